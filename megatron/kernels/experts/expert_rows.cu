#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "megatron/kernels/detail/async_copy.cuh"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/experts/expert_rows.h"

namespace megatron {
namespace {

// Note [Order by expert]
// Choices are cut into chunks of kExpertOrderChunk. The first kernel counts the choices of every
// expert in each chunk, the second scans these counts by expert, then by chunk, so that a chunk
// knows the first row of each of its experts, and the third places the choices of a chunk: a warp
// takes 32 neighbours at a time, in their order. Dropped choices belong to a last expert.
constexpr int kWarps = kThreads / 32;
constexpr int kTurns = static_cast<int>(kExpertOrderChunk) / kThreads;
constexpr int kScanThreads = 1024, kScanItems = 8;

__device__ __forceinline__ int expert_of(const ExpertOrderArgs& args, int64_t choice) {
  const int64_t expert = int64_t{args.experts[choice]} - args.first_expert;
  return static_cast<int>(expert >= 0 && expert < args.num_experts ? expert : args.num_experts);
}

__global__ void __launch_bounds__(kThreads) count_chunks(ExpertOrderArgs args, int32_t* counts) {
  extern __shared__ int32_t of_chunk[];  // [num_experts + 1]
  const int buckets = static_cast<int>(args.num_experts) + 1;
  for (int e = threadIdx.x; e < buckets; e += kThreads) of_chunk[e] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * kExpertOrderChunk,
                end = min(first + kExpertOrderChunk, args.choices);
  for (int64_t i = first + threadIdx.x; i < end; i += kThreads)
    atomicAdd(&of_chunk[expert_of(args, i)], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < buckets; e += kThreads)
    counts[int64_t{e} * gridDim.x + blockIdx.x] = of_chunk[e];
}

// One block. Counts become the sums of all counts before them.
__global__ void __launch_bounds__(kScanThreads)
    scan_chunks(ExpertOrderArgs args, int32_t* counts, int64_t chunks) {
  using Scan = cub::BlockScan<int32_t, kScanThreads>;
  __shared__ typename Scan::TempStorage storage;
  const int64_t total = (args.num_experts + 1) * chunks;
  int32_t before = 0;
  for (int64_t base = 0; base < total; base += kScanThreads * kScanItems) {
    int32_t items[kScanItems], sum;
    const int64_t first = base + int64_t{threadIdx.x} * kScanItems;
#pragma unroll
    for (int i = 0; i < kScanItems; ++i) items[i] = first + i < total ? counts[first + i] : 0;
    Scan(storage).ExclusiveSum(items, items, sum);
#pragma unroll
    for (int i = 0; i < kScanItems; ++i)
      if (first + i < total) counts[first + i] = before + items[i];
    before += sum;
    __syncthreads();
  }
  for (int64_t e = threadIdx.x; e < args.num_experts; e += kScanThreads)
    args.counts[e] = counts[(e + 1) * chunks] - counts[e * chunks];
}

__global__ void __launch_bounds__(kThreads)
    place_choices(ExpertOrderArgs args, const int32_t* first_rows) {
  extern __shared__ int32_t
      next[];  // [kWarps, num_experts + 1]: the next row of each warp's choice
  const int buckets = static_cast<int>(args.num_experts) + 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * buckets; i += kThreads) next[i] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * kExpertOrderChunk + warp * (32 * kTurns) + lane;
  int experts[kTurns];
  unsigned equals[kTurns];  // lanes with the same expert
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t choice = first + turn * 32;
    experts[turn] = choice < args.choices ? expert_of(args, choice) : -1;
    equals[turn] = __match_any_sync(0xffffffffu, experts[turn]);
    const bool leads = lane == __ffs(static_cast<int>(equals[turn])) - 1;
    if (leads && experts[turn] >= 0) next[warp * buckets + experts[turn]] += __popc(equals[turn]);
    __syncwarp();
  }
  __syncthreads();
  for (int e = threadIdx.x; e < buckets; e += kThreads) {
    int32_t row = first_rows[int64_t{e} * gridDim.x + blockIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const int32_t count = next[w * buckets + e];
      next[w * buckets + e] = row;
      row += count;
    }
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int expert = experts[turn];
    const int place = __popc(equals[turn] & ((1u << lane) - 1));
    int32_t* const row_of = next + warp * buckets + max(expert, 0);
    const int32_t row = *row_of + place;
    __syncwarp();
    if (expert >= 0) {
      const int64_t choice = first + turn * 32;
      if (place == 0) *row_of += __popc(equals[turn]);
      args.order[row] = choice;
      args.rows[choice] = expert < args.num_experts ? row : -1;
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads) parts_of_choices_kernel(PartsOfChoices args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.tokens * args.num_parts) return;
  const int64_t token = i / args.num_parts, part = i % args.num_parts;
  bool is_chosen = false;
  for (int64_t j = 0; j < args.choices; ++j) {
    const int32_t expert = args.experts[token * args.choices + j];
    is_chosen |= expert >= 0 && expert / args.experts_of_part == part;
  }
  args.parts[i] = is_chosen ? static_cast<int32_t>(part) : -1;
}

__global__ void __launch_bounds__(kThreads) rows_in_parts_kernel(RowsInParts args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.rows) return;
  const int64_t choice = args.order[i], part = args.experts[choice] / args.experts_of_part;
  args.to[i] = args.token_rows[choice / args.choices * args.num_parts + part] + args.shift[part];
}

// Threads of a block: `x` along a row, `y` rows.
dim3 block_for(int64_t groups_of_row) {
  unsigned x = 1;
  while (x < kThreads && x < groups_of_row) x *= 2;
  return {x, kThreads / x};
}

constexpr int kRowsOfThread = 4;

template <class Unit>
__global__ void __launch_bounds__(kThreads) gather_kernel(GatherRows args, int64_t units) {
  const auto* from = static_cast<const Unit*>(args.from);
  auto* to = static_cast<Unit*>(args.to);
  const int64_t first = int64_t{blockIdx.x} * (blockDim.y * kRowsOfThread) + threadIdx.y;
  int64_t source[kRowsOfThread];
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    const int64_t row = first + r * blockDim.y;
    const int64_t index = row < args.rows ? args.index[row] : -1;
    source[r] = index < 0 ? -1 : index / args.divisor;
  }
  for (int64_t u = threadIdx.x; u < units; u += blockDim.x) {
    Unit values[kRowsOfThread];
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r)
      values[r] = source[r] < 0 ? Unit{} : from[source[r] * units + u];
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      const int64_t row = first + r * blockDim.y;
      if (row >= args.rows) continue;
      // Rows of other choices of the same tokens, still to be read, shall stay in the L2 cache.
      if constexpr (std::is_same_v<Unit, uint4>) {
        store_once(to + row * units + u, values[r]);
      } else {
        to[row * units + u] = values[r];
      }
    }
  }
}

constexpr int kTokensOfThread = 2;

template <class Unit>
__global__ void __launch_bounds__(kThreads) spread_kernel(SpreadRows args, int64_t units) {
  const auto* from = static_cast<const Unit*>(args.from);
  auto* to = static_cast<Unit*>(args.to);
  const int64_t first = int64_t{blockIdx.x} * (blockDim.y * kTokensOfThread) + threadIdx.y;
  for (int64_t u = threadIdx.x; u < units; u += blockDim.x) {
    Unit values[kTokensOfThread];
#pragma unroll
    for (int t = 0; t < kTokensOfThread; ++t) {
      const int64_t token = first + t * blockDim.y;
      if (token < args.tokens) values[t] = from[token * units + u];
    }
#pragma unroll
    for (int t = 0; t < kTokensOfThread; ++t) {
      const int64_t token = first + t * blockDim.y;
      if (token >= args.tokens) continue;
      const int64_t* places = args.places + token * args.choices;
      for (int64_t j = 0; j < args.choices; ++j)
        if (const int64_t place = places[j]; place >= 0) to[place * units + u] = values[t];
    }
  }
}

// Calls launch.operator()<Unit>(units, block) with the widest unit that divides and aligns rows.
template <class Launch>
void with_unit_of_rows(int64_t row_bytes, const void* from, const void* to, const Launch& launch) {
  const auto fits = [&]<class Unit>() {
    const auto divides = [](uintptr_t number) { return number % sizeof(Unit) == 0; };
    if (!divides(static_cast<uintptr_t>(row_bytes)) ||
        !divides(reinterpret_cast<uintptr_t>(from)) || !divides(reinterpret_cast<uintptr_t>(to)))
      return false;
    const int64_t units = row_bytes / static_cast<int64_t>(sizeof(Unit));
    launch.template operator()<Unit>(units, block_for(units));
    return true;
  };
  fits.template operator()<uint4>() || fits.template operator()<uint32_t>() ||
      fits.template operator()<uint16_t>() || fits.template operator()<uint8_t>();
}

unsigned blocks_of(int64_t rows, int64_t of_block) {
  return static_cast<unsigned>((rows + of_block - 1) / of_block);
}

constexpr int kChoicesAtOnce = 4;

// A thread adds up one group of columns of one token. `Sum` is T or its type of sums.
template <class T, class Sum, class Group>
__global__ void __launch_bounds__(kThreads) sum_kernel(SumOfRows args) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = Group::kSize;
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= args.tokens) return;
  const int64_t* places = args.places + token * args.choices;
  for (int64_t column = int64_t{threadIdx.x} * kSize; column < args.columns;
       column += int64_t{blockDim.x} * kSize) {
    const int64_t at = token * args.columns + column;
    Sum* to = static_cast<Sum*>(args.sums) + at;
    Acc total[kSize] = {};
    if (args.base != nullptr) {
      const Sum* base = static_cast<const Sum*>(args.base) + at;
      if constexpr (std::is_same_v<Sum, T>) {
        const Group group = load_group<Group>(base);
#pragma unroll
        for (int i = 0; i < kSize; ++i) total[i] = load_as<Acc>(group.at[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) total[i] = load_as<Acc>(base[i]);
      }
    }
    for (int64_t first = 0; first < args.choices; first += kChoicesAtOnce) {
      Group rows[kChoicesAtOnce];
      bool taken[kChoicesAtOnce];
#pragma unroll
      for (int j = 0; j < kChoicesAtOnce; ++j) {
        const int64_t place = first + j < args.choices ? places[first + j] : -1;
        taken[j] = place >= 0;
        if (taken[j])
          rows[j] =
              load_group<Group>(static_cast<const T*>(args.rows) + place * args.columns + column);
      }
#pragma unroll
      for (int j = 0; j < kChoicesAtOnce; ++j) {
        if (!taken[j]) continue;
#pragma unroll
        for (int i = 0; i < kSize; ++i) total[i] += load_as<Acc>(rows[j].at[i]);
      }
    }
    if constexpr (std::is_same_v<Sum, T>) {
      Group out;
#pragma unroll
      for (int i = 0; i < kSize; ++i) store_as(out.at[i], total[i]);
      store_group(to, out);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) store_as(to[i], total[i]);
    }
  }
}

// Note [Sums through rings]
// A block adds up the rows of consecutive tokens, one pack of columns per thread. It reads their
// places first; then the rows come through a ring (Note [Rings of loads]), so that a thread waits
// for memory once and not once for each token.
constexpr int kRingThreads = 128, kRingSlots = 4, kRingBlocks = 16;  // blocks per multiprocessor
constexpr int64_t kRingPlaces = 512;                                 // of a block, at most

template <class T>
__global__ void __launch_bounds__(kRingThreads)
    sum_ring_kernel(SumOfRows args, int64_t tokens_of_block) {
  __shared__ uint4 ring[kRingSlots][kRingThreads];
  __shared__ int64_t places[kRingPlaces];
  const int64_t first = blockIdx.x * tokens_of_block,
                tokens = min(tokens_of_block, args.tokens - first);
  for (int64_t i = threadIdx.x; i < tokens * args.choices; i += kRingThreads)
    places[i] = args.places[first * args.choices + i];
  __syncthreads();
  const int64_t column =
      (int64_t{blockIdx.y} * kRingThreads + threadIdx.x) * int64_t{Pack<T>::kSize};
  if (column >= args.columns) return;

  const T* const rows = static_cast<const T*>(args.rows) + column;
  const T* base = static_cast<const T*>(args.base);
  T* to = static_cast<T*>(args.sums) + first * args.columns + column;
  if (base != nullptr) base += first * args.columns + column;
  // Of each token its base, if there is one, and its choices: `next` is the one to load, `j` the
  // one to add.
  const int begin = base == nullptr ? 0 : -1, choices = static_cast<int>(args.choices);
  const int items = static_cast<int>(tokens) * (choices - begin);
  int next = begin, loaded = 0;
  const int64_t* next_places = places;
  const auto load = [&] {
    if (loaded < items) {
      const T* from = nullptr;
      if (next < 0) {
        from = base;
        base += args.columns;
      } else if (const int64_t place = next_places[next]; place >= 0) {
        from = rows + place * args.columns;
      }
      if (from != nullptr) copy_async(&ring[loaded % kRingSlots][threadIdx.x], from);
      if (++next == choices) {
        next = begin;
        next_places += choices;
      }
      ++loaded;
    }
    end_copy_group();
  };
#pragma unroll
  for (int slot = 0; slot < kRingSlots - 1; ++slot) load();
  AccumulateType<T> total[Pack<T>::kSize] = {};
  const int64_t* own_places = places;
  for (int i = 0, j = begin; i < items; ++i) {
    load();
    wait_for_copies<kRingSlots - 1>();
    if (j < 0 || own_places[j] >= 0) {
      AccumulateType<T> row[Pack<T>::kSize];
      unpack<T>(ring[i % kRingSlots][threadIdx.x], row);
#pragma unroll
      for (int e = 0; e < Pack<T>::kSize; ++e) total[e] += row[e];
    }
    if (++j < choices) continue;
    store_group(to, pack_words<T>(total));
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; ++e) total[e] = 0;
    to += args.columns;
    own_places += choices;
    j = begin;
  }
}

template <class T>
void launch_sum_ring(const SumOfRows& args, cudaStream_t stream) {
  const int64_t columns = int64_t{kRingThreads} * Pack<T>::kSize;
  const unsigned parts = blocks_of(args.columns, columns);
  const int64_t at_once = std::max<int64_t>(1, int64_t{multiprocessors()} * kRingBlocks / parts);
  const int64_t tokens =
      std::min((args.tokens + at_once - 1) / at_once, kRingPlaces / args.choices);
  sum_ring_kernel<T>
      <<<dim3(blocks_of(args.tokens, tokens), parts), kRingThreads, 0, stream>>>(args, tokens);
}

template <class T, class Sum>
void launch_sum(const SumOfRows& args, cudaStream_t stream) {
  const bool packs = fits_packs<T>(args.columns, {args.rows, args.base, args.sums});
  const dim3 block = block_for(packs ? args.columns / Pack<T>::kSize : args.columns);
  const unsigned blocks = blocks_of(args.tokens, block.y);
  if constexpr (std::is_same_v<Sum, T>) {
    if (packs && args.choices > 0 && args.choices <= kRingPlaces)
      return launch_sum_ring<T>(args, stream);
  }
  if (packs) {
    sum_kernel<T, Sum, Pack<T>><<<blocks, block, 0, stream>>>(args);
  } else {
    sum_kernel<T, Sum, Single<T>><<<blocks, block, 0, stream>>>(args);
  }
}

}  // namespace

void expert_order_cuda(const ExpertOrderArgs& args, void* stream) {
  const cudaStream_t s = as_stream(stream);
  if (args.choices == 0) {
    check_cuda(cudaMemsetAsync(args.counts, 0, args.num_experts * sizeof(int32_t), s),
               "cudaMemsetAsync");
    return;
  }
  auto* counts = static_cast<int32_t*>(args.workspace);
  const int64_t chunks = (args.choices + kExpertOrderChunk - 1) / kExpertOrderChunk;
  const size_t bytes = (args.num_experts + 1) * sizeof(int32_t);
  MEGATRON_CHECK(allow_shared_memory(count_chunks, bytes) &&
                     allow_shared_memory(place_choices, kWarps * bytes),
                 "rows cannot be sorted by ", args.num_experts,
                 " experts: their counts do not fit into the shared memory of this GPU");
  count_chunks<<<static_cast<unsigned>(chunks), kThreads, bytes, s>>>(args, counts);
  scan_chunks<<<1, kScanThreads, 0, s>>>(args, counts, chunks);
  place_choices<<<static_cast<unsigned>(chunks), kThreads, kWarps * bytes, s>>>(args, counts);
  check_cuda(cudaGetLastError(), "order of rows by expert");
}

void parts_of_choices_cuda(const PartsOfChoices& args, void* stream) {
  if (args.tokens * args.num_parts == 0) return;
  parts_of_choices_kernel<<<blocks_of(args.tokens * args.num_parts, kThreads), kThreads, 0,
                            as_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "parts of the experts that tokens go to");
}

void rows_in_parts_cuda(const RowsInParts& args, void* stream) {
  if (args.rows == 0) return;
  rows_in_parts_kernel<<<blocks_of(args.rows, kThreads), kThreads, 0, as_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "rows of choices in the order of parts");
}

void gather_rows_cuda(const GatherRows& args, void* stream) {
  if (args.rows * args.row_bytes == 0) return;
  with_unit_of_rows(
      args.row_bytes, args.from, args.to, [&]<class Unit>(int64_t units, const dim3& block) {
        gather_kernel<Unit>
            <<<blocks_of(args.rows, block.y * kRowsOfThread), block, 0, as_stream(stream)>>>(args,
                                                                                             units);
      });
  check_cuda(cudaGetLastError(), "gathering of rows");
}

void spread_rows_cuda(const SpreadRows& args, void* stream) {
  if (args.tokens * args.choices * args.row_bytes == 0) return;
  with_unit_of_rows(
      args.row_bytes, args.from, args.to, [&]<class Unit>(int64_t units, const dim3& block) {
        spread_kernel<Unit>
            <<<blocks_of(args.tokens, block.y * kTokensOfThread), block, 0, as_stream(stream)>>>(
                args, units);
      });
  check_cuda(cudaGetLastError(), "spreading of rows");
}

void sum_of_rows_cuda(const SumOfRows& args, void* stream) {
  if (args.tokens * args.columns == 0) return;
  with_cuda_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.sum_dtype == args.dtype) {
      launch_sum<T, T>(args, as_stream(stream));
    } else {
      launch_sum<T, AccumulateType<T>>(args, as_stream(stream));
    }
  });
  check_cuda(cudaGetLastError(), "sum of rows");
}

}  // namespace megatron
