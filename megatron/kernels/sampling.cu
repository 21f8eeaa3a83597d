// Compiled with --fmad=false so that draws are bit-equal to the CPU's. A block of threads per row;
// where there are few rows on Hopper, a cluster of them, for largest numbers, which have no order.
#include <cooperative_groups.h>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/sampling_math.h"

namespace megatron {
namespace {

constexpr int kRowThreads = 512;

template <class Acc>
__device__ Acc largest_of_block(Acc value, Acc* shared) {
  return reduce_block(value, MaxOp(), shared);
}

template <class Acc>
__device__ Acc largest_of_row(const Acc* x, int64_t columns, Acc* shared) {
  Acc most = -INFINITY;
  for (int64_t i = threadIdx.x; i < columns; i += kRowThreads) most = x[i] > most ? x[i] : most;
  return largest_of_block(most, shared);
}

// Blocks of a row that is divided, and how many rows of how many columns are.
constexpr int kParts = 8;
constexpr int64_t kMostDividedRows = 32, kLeastDividedColumns = 4096;

// The part of a row that this block has.
struct RowPart {
  int64_t row = 0;
  int rank = 0, count = 1;
  __device__ int64_t first() const { return int64_t{rank} * kRowThreads + threadIdx.x; }
  __device__ int64_t step() const { return int64_t{count} * kRowThreads; }
};
__device__ RowPart row_part() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  const auto count = static_cast<int>(cluster.num_blocks());
  return {blockIdx.x / count, static_cast<int>(cluster.block_rank()), count};
#else
  return {blockIdx.x, 0, 1};
#endif
}

// combine(what another block of the row has), by the first thread of the first one. `own`: this
// block's, in shared memory, written by its first thread.
template <class T, class F>
__device__ void combine_parts([[maybe_unused]] T* own, [[maybe_unused]] const RowPart& part,
                              [[maybe_unused]] F&& combine) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (part.count == 1) return;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  if (part.rank == 0 && threadIdx.x == 0)
    for (int i = 1; i < part.count; ++i) combine(*cluster.map_shared_rank(own, i));
  cluster.sync();  // shared memory stays until it was read
#endif
}

template <class Acc>
struct Extremes {
  Acc bad, most;
};

// Of logits as they are.
template <class Acc>
__global__ void __launch_bounds__(kRowThreads) extremes_kernel(SamplingLogits a, double* extremes) {
  __shared__ Acc shared[33];
  __shared__ Extremes<Acc> own;
  const RowPart part = row_part();
  const Acc* x = static_cast<const Acc*>(a.logits) + part.row * a.stride;
  Acc bad = 0, most = -INFINITY;
#pragma unroll 4
  for (int64_t i = part.first(); i < a.columns; i += part.step()) {
    const Acc value = x[i];
    if (!(value < Acc(INFINITY))) bad = 1;
    most = value > most ? value : most;
  }
  bad = largest_of_block(bad, shared);
  most = largest_of_block(most, shared);
  if (threadIdx.x == 0) own = {bad, most};
  combine_parts(&own, part, [&](const Extremes<Acc>& other) {
    bad = max(bad, other.bad);
    most = max(most, other.most);
  });
  if (threadIdx.x != 0 || part.rank != 0) return;
  extremes[part.row] = static_cast<double>(bad);
  extremes[a.rows + part.row] = extremes[2 * a.rows + part.row] = static_cast<double>(most);
}

template <class Acc>
__global__ void __launch_bounds__(kRowThreads) process_kernel(SamplingLogits a, double* extremes) {
  __shared__ Acc shared[33];
  const int64_t row = blockIdx.x;
  Acc* x = static_cast<Acc*>(a.logits) + row * a.stride;
  Acc bad = 0;
  for (int64_t i = threadIdx.x; i < a.columns; i += kRowThreads)
    if (!(x[i] < Acc(INFINITY))) bad = 1;
  bad = largest_of_block(bad, shared);
  const Acc before = largest_of_row(x, a.columns, shared);
  Acc after = before;
  const bool changes = a.row != nullptr &&
                       (a.row[row].num_edits > 0 || a.row[row].counts >= 0 || a.row[row].mask >= 0);
  if (changes) {
    const SamplingRow how = a.row[row];
    // One thread: an id may be edited twice.
    if (threadIdx.x == 0) {
      for (int32_t i = how.first_edit; i < how.first_edit + how.num_edits; ++i) {
        const int64_t column = a.edit_ids[i] - a.first_id;
        if (column >= 0 && column < a.columns) x[column] += static_cast<Acc>(a.edit_values[i]);
      }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < a.columns; i += kRowThreads) {
      if (how.counts >= 0) x[i] = penalised(x[i], how, a.counts[how.counts * a.columns + i]);
      if (is_masked(a, how, a.first_id + i)) x[i] = -INFINITY;
    }
    __syncthreads();
    after = largest_of_row(x, a.columns, shared);
  }
  if (threadIdx.x != 0) return;
  extremes[row] = static_cast<double>(bad);
  extremes[a.rows + row] = static_cast<double>(before);
  extremes[2 * a.rows + row] = static_cast<double>(after);
}

using Sum = unsigned long long;

template <class Acc>
__global__ void __launch_bounds__(kRowThreads)
    histogram_kernel(SamplingLogits a, SelectBy by, int pass, int64_t* histogram) {
  __shared__ Sum bins[kSelectionBins];
  const int64_t row = blockIdx.x;
  for (int bin = threadIdx.x; bin < kSelectionBins; bin += kRowThreads) bins[bin] = 0;
  __syncthreads();
  if (selects(a.row[row], by) && (pass == 0 || a.kept[row].remaining >= 0)) {
    const LogitsRow<Acc> own = logits_row<Acc>(a, row);
    const int shift = selection_shift<Acc>(pass);
    const uint64_t prefix = a.kept[row].prefix;
    for (int64_t i = threadIdx.x; i < own.columns; i += kRowThreads) {
      const auto key = order_key(own.x[i]);
      if (pass > 0 && static_cast<uint64_t>(key >> (shift + kSelectionDigitBits)) != prefix)
        continue;
      if (!own.keeps(i)) continue;
      const int64_t weight = by == SelectBy::kCount ? 1 : own.probability(own.x[i]);
      if (weight != 0)
        atomicAdd(&bins[key >> shift & (kSelectionBins - 1)], static_cast<Sum>(weight));
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kSelectionBins; bin += kRowThreads)
    histogram[row * kSelectionBins + bin] = static_cast<int64_t>(bins[bin]);
}

__global__ void narrow_kernel(SamplingLogits a, SelectBy by, int pass, const int64_t* histogram,
                              SamplingKept* kept) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row < a.rows) narrow(a.row[row], by, pass, histogram + row * kSelectionBins, kept[row]);
}

template <class Acc>
__device__ Acc found_value(const SamplingKept& kept) {
  return OrderKey<Acc>::value(static_cast<typename OrderKey<Acc>::type>(kept.prefix));
}

__device__ int64_t sum_of_block(int64_t value, int64_t* shared) {
  return reduce_block(value, AddOp(), shared);
}

template <class Acc>
__global__ void __launch_bounds__(kRowThreads)
    ties_kernel(SamplingLogits a, const SamplingKept* found, int64_t* ties) {
  __shared__ int64_t shared[33];
  const int64_t row = blockIdx.x;
  int64_t count = 0;
  if (found[row].remaining >= 0) {
    const LogitsRow<Acc> own = logits_row<Acc>(a, row);
    const Acc value = found_value<Acc>(found[row]);
    for (int64_t i = threadIdx.x; i < own.columns; i += kRowThreads)
      count += own.x[i] == value && own.keeps(i) ? 1 : 0;
  }
  count = sum_of_block(count, shared);
  if (threadIdx.x == 0) ties[row] = count;
}

// Runs of kRowThreads ids in their order, until enough ties have been seen.
template <class Acc>
__global__ void __launch_bounds__(kRowThreads)
    place_kernel(SamplingLogits a, SelectBy by, const int64_t* before, SamplingKept* found) {
  __shared__ int64_t shared[33];
  const int64_t row = blockIdx.x;
  if (found[row].remaining < 0) return;
  const LogitsRow<Acc> own = logits_row<Acc>(a, row);
  const Acc value = found_value<Acc>(found[row]);
  const int64_t ties = kept_ties(own, by, value, found[row].remaining) -
                       (before != nullptr ? before[row] : int64_t{0});
  int64_t last = -1, seen = 0;
  for (int64_t begin = 0; begin < own.columns && seen < ties; begin += kRowThreads) {
    const int64_t i = begin + threadIdx.x;
    const bool tie = i < own.columns && own.x[i] == value && own.keeps(i);
    const int64_t count = sum_of_block(tie ? 1 : 0, shared);
    __syncthreads();
    if (seen + count <= ties) {
      last = tie ? own.first_id + i : last;
      seen += count;
      continue;
    }
    // The last of the ties to be kept is in this run: counted by one thread.
    if (threadIdx.x == 0) {
      for (int64_t j = begin; seen < ties; ++j) {
        if (own.x[j] != value || !own.keeps(j)) continue;
        last = own.first_id + j;
        ++seen;
      }
    }
    break;
  }
  last = reduce_block(last, MaxOp(), shared);
  if (threadIdx.x != 0) return;
  found[row].value = static_cast<double>(value);
  found[row].last = last;
  found[row].remaining = -1;
}

// The first of the block's (value, id) pairs in the order of precedes(); every thread gets it.
template <class Acc>
__device__ void first_of_block(Acc& value, int64_t& id, Acc* values, int64_t* ids) {
  values[threadIdx.x] = value;
  ids[threadIdx.x] = id;
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    const int other = threadIdx.x + half;
    if (static_cast<int>(threadIdx.x) < half &&
        precedes(values[other], ids[other], values[threadIdx.x], ids[threadIdx.x])) {
      values[threadIdx.x] = values[other];
      ids[threadIdx.x] = ids[other];
    }
  }
  __syncthreads();
  value = values[0];
  id = ids[0];
  __syncthreads();
}

template <class Acc>
struct Candidate {
  Acc value;
  int64_t id;
};

template <class Acc>
__global__ void __launch_bounds__(kRowThreads) draw_kernel(SamplingLogits a, double* best) {
  __shared__ Acc values[kRowThreads];
  __shared__ int64_t ids[kRowThreads];
  __shared__ Candidate<Acc> best_of_block;
  const RowPart part = row_part();
  const int64_t row = part.row;
  const SamplingRow how = a.row[row];
  const LogitsRow<Acc> own = logits_row<Acc>(a, row);
  const bool noisy = how.temperature > 0.0;
  Acc most = -INFINITY;
  int64_t chosen = -1;
  // Each thread takes the four ids of a Philox block.
  for (int64_t block = own.first_id / 4 + part.first(); 4 * block < own.first_id + own.columns;
       block += part.step()) {
    uint32_t words[4];
    if (noisy) {
      const uint64_t counter = noise_block(how, 4 * block);
      words[0] = static_cast<uint32_t>(counter);
      words[1] = static_cast<uint32_t>(counter >> 32);
      words[2] = words[3] = 0;
      philox_rounds(words[0], words[1], words[2], words[3], static_cast<uint32_t>(how.key),
                    static_cast<uint32_t>(how.key >> 32));
    }
    for (int j = 0; j < 4; ++j) {
      const int64_t i = 4 * block + j - own.first_id;
      if (i < 0 || i >= own.columns || (noisy && !own.keeps(i))) continue;
      Acc value = own.x[i];
      if (noisy) value += own.temperature * static_cast<Acc>(gumbel_noise(words[j]));
      if (!(value > most)) continue;
      most = value;
      chosen = 4 * block + j;
    }
  }
  first_of_block(most, chosen, values, ids);
  if (threadIdx.x == 0) best_of_block = {most, chosen};
  combine_parts(&best_of_block, part, [&](const Candidate<Acc>& other) {
    if (!precedes(other.value, other.id, most, chosen)) return;
    most = other.value;
    chosen = other.id;
  });
  if (threadIdx.x != 0 || part.rank != 0) return;
  best[row] = static_cast<double>(most);
  best[a.rows + row] = static_cast<double>(chosen);
}

template <class Acc>
__global__ void __launch_bounds__(kRowThreads) sum_kernel(SamplingLogits a, int64_t* sums) {
  __shared__ int64_t shared[33];
  const LogitsRow<Acc> own = logits_row<Acc>(a, blockIdx.x);
  int64_t sum = 0;
  for (int64_t i = threadIdx.x; i < own.columns; i += kRowThreads)
    if (own.keeps(i)) sum += own.probability(own.x[i]);
  sum = sum_of_block(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One round for each entry: the first of those that follow the one before.
template <class Acc>
__global__ void __launch_bounds__(kRowThreads)
    largest_kernel(SamplingLogits a, int64_t n, double* values, int64_t* ids) {
  __shared__ Acc shared_values[kRowThreads];
  __shared__ int64_t shared_ids[kRowThreads];
  const int64_t row = blockIdx.x;
  const LogitsRow<Acc> own = logits_row<Acc>(a, row);
  Acc last = INFINITY;
  int64_t last_id = -1;
  for (int64_t entry = 0; entry < n; ++entry) {
    Acc value = -INFINITY;
    int64_t id = -1;
    for (int64_t i = threadIdx.x; i < own.columns; i += kRowThreads) {
      const Acc x = own.x[i];
      const int64_t own_id = own.first_id + i;
      const bool follows = x < last || (x == last && own_id > last_id);
      if (follows && precedes(x, own_id, value, id) && own.keeps(i)) {
        value = x;
        id = own_id;
      }
    }
    first_of_block(value, id, shared_values, shared_ids);
    if (threadIdx.x == 0) {
      values[row * n + entry] = id < 0 ? -INFINITY : static_cast<double>(value);
      ids[row * n + entry] = id;
    }
    // Behind the last nothing follows.
    last = id < 0 ? Acc(-INFINITY) : value;
    last_id = id < 0 ? INT64_MAX : id;
  }
}

__global__ void count_kernel(SamplingLogits a, const int64_t* ids, int32_t* counts) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= a.rows || ids[row] < 0 || a.row[row].counts < 0) return;
  const int64_t column = ids[row] - a.first_id;
  if (column >= 0 && column < a.columns) counts[a.row[row].counts * a.columns + column] += 2;
}

__global__ void tell_kernel(ToldDraws a) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row < a.rows) tell_draw(a, row);
}

// Calls f with the type of the logits, then checks the launch.
template <class F>
void start_rows(const SamplingLogits& a, const char* what, F&& f) {
  if (a.dtype == DType::kFloat64) {
    f(double{});
  } else {
    f(float{});
  }
  check_cuda(cudaGetLastError(), what);
}

unsigned grid(const SamplingLogits& a) { return static_cast<unsigned>(a.rows); }

// Starts a kernel that knows parts of rows.
template <class Kernel, class Out>
void start_parts(const SamplingLogits& a, Kernel kernel, Out* out, void* stream) {
  static const bool hopper = is_hopper();
  const bool divided = hopper && a.rows <= kMostDividedRows && a.columns >= kLeastDividedColumns;
  const unsigned parts = divided ? kParts : 1;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = parts;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid(a) * parts;
  config.blockDim = kRowThreads;
  config.stream = as_stream(stream);
  config.attrs = &cluster;
  config.numAttrs = divided ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, a, out), "a launch of parts of rows");
}

}  // namespace

void process_logits_cuda(const SamplingLogits& a, double* extremes, void* stream) {
  start_rows(a, "process_logits", [&](auto acc) {
    if (a.row == nullptr) return start_parts(a, extremes_kernel<decltype(acc)>, extremes, stream);
    process_kernel<decltype(acc)><<<grid(a), kRowThreads, 0, as_stream(stream)>>>(a, extremes);
  });
}

void selection_histogram_cuda(const SamplingLogits& a, SelectBy by, int pass, int64_t* histogram,
                              void* stream) {
  start_rows(a, "selection_histogram", [&](auto acc) {
    histogram_kernel<decltype(acc)>
        <<<grid(a), kRowThreads, 0, as_stream(stream)>>>(a, by, pass, histogram);
  });
}

void narrow_selection_cuda(const SamplingLogits& a, SelectBy by, int pass, const int64_t* histogram,
                           SamplingKept* kept, void* stream) {
  narrow_kernel<<<blocks_for(a.rows), kThreads, 0, as_stream(stream)>>>(a, by, pass, histogram,
                                                                        kept);
  check_cuda(cudaGetLastError(), "narrow_selection");
}

void count_ties_cuda(const SamplingLogits& a, const SamplingKept* found, int64_t* ties,
                     void* stream) {
  start_rows(a, "count_ties", [&](auto acc) {
    ties_kernel<decltype(acc)><<<grid(a), kRowThreads, 0, as_stream(stream)>>>(a, found, ties);
  });
}

void place_ties_cuda(const SamplingLogits& a, SelectBy by, const int64_t* before,
                     SamplingKept* found, void* stream) {
  start_rows(a, "place_ties", [&](auto acc) {
    place_kernel<decltype(acc)>
        <<<grid(a), kRowThreads, 0, as_stream(stream)>>>(a, by, before, found);
  });
}

void draw_tokens_cuda(const SamplingLogits& a, double* best, void* stream) {
  start_rows(a, "draw_tokens",
             [&](auto acc) { start_parts(a, draw_kernel<decltype(acc)>, best, stream); });
}

void sum_probabilities_cuda(const SamplingLogits& a, int64_t* sums, void* stream) {
  start_rows(a, "sum_probabilities", [&](auto acc) {
    sum_kernel<decltype(acc)><<<grid(a), kRowThreads, 0, as_stream(stream)>>>(a, sums);
  });
}

void largest_logits_cuda(const SamplingLogits& a, int64_t n, double* values, int64_t* ids,
                         void* stream) {
  start_rows(a, "largest_logits", [&](auto acc) {
    largest_kernel<decltype(acc)>
        <<<grid(a), kRowThreads, 0, as_stream(stream)>>>(a, n, values, ids);
  });
}

void count_tokens_cuda(const SamplingLogits& a, const int64_t* ids, int32_t* counts, void* stream) {
  count_kernel<<<blocks_for(a.rows), kThreads, 0, as_stream(stream)>>>(a, ids, counts);
  check_cuda(cudaGetLastError(), "count_tokens");
}

void tell_draws_cuda(const ToldDraws& args, void* stream) {
  tell_kernel<<<blocks_for(args.rows), kThreads, 0, as_stream(stream)>>>(args);
  check_cuda(cudaGetLastError(), "tell_draws");
}

}  // namespace megatron
