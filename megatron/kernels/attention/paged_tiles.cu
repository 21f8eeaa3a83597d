// Note [Paged attention by tiles]
// Decoding reads keys and values once: all queries of a group of heads, up to 16, are rows of one
// product on tensor cores. A warp takes tiles of 16 positions, with a ring of its own that cp.async
// fills, so that warps never wait for each other inside the loop; what they have seen is added in
// the order of the warps. Where sequences and groups are too few for the device, the positions of
// one are divided over the blocks of a cluster, which add their parts in order through shared
// memory: no scratch memory, no second kernel, and no sum whose order depends on timing.
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>

#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/detail/mma_tiles.cuh"
#include "megatron/kernels/detail/paged_pool.h"
#include "megatron/kernels/detail/sm90.cuh"

namespace megatron {
namespace {

constexpr int kWarps = 4, kTile = 16, kMostSplits = 8;
constexpr int kBlock = kWarps * kWarpThreads;

// Heads are padded to D features by zeros.
template <class T, int D, bool Fp8>
struct WarpRing {
  using Stored = std::conditional_t<Fp8, uint8_t, T>;
  static constexpr int kStages = D == 64 ? (Fp8 ? 8 : 6) : (Fp8 ? 4 : 3);
  Stored keys[kStages][kTile * D], values[kStages][kTile * D];
  T wide[2][Fp8 ? kTile * D : 8];  // keys and values of the tile that is being multiplied
};

// What the block, or a split of a cluster, has seen. The sums are not yet divided by `sum`.
template <int D>
struct Part {
  float most[kTile], sum[kTile];
  float values[kTile][D];
};
template <class T, int D, bool Fp8>
union Memory {
  WarpRing<T, D, Fp8> rings[kWarps];
  struct {
    Part<D> of_warps[kWarps];
    Part<D> whole;
  } parts;
  __device__ Memory() {}
};

// 16 codes of E4M3 as 16 elements of T.
template <class T>
__device__ __forceinline__ void widen(const uint4& codes, uint4 (&to)[2]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16));
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
    if constexpr (std::is_same_v<T, __half>) {
      memcpy(&out[i], &raw, sizeof out[i]);
    } else {
      const float2 wide = __half22float2(__half2(raw));
      out[i] = pack_two<T>(wide.x, wide.y);
    }
  }
  to[0] = {out[0], out[1], out[2], out[3]};
  to[1] = {out[4], out[5], out[6], out[7]};
}

// Starts the copy of a tile of 16 positions; features behind those of a head and positions outside
// [first, end) become zeros. Codes of FP8 lie row by row.
template <class T, int D, bool Fp8>
__device__ __forceinline__ void fetch(void* to, const PagedPool& pool, int64_t place, int64_t size,
                                      int position, int first, int end) {
  constexpr int kChunks = D * (Fp8 ? 1 : 2) / 16, kElements = Fp8 ? 16 : 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const auto* data = static_cast<const std::conditional_t<Fp8, uint8_t, T>*>(pool.data) + place;
  const SharedTile<T, D> tile(to);
#pragma unroll
  for (int i = 0; i < kTile * kChunks / kWarpThreads; ++i) {
    const int index = i * kWarpThreads + lane, row = index / kChunks, column = index % kChunks;
    const bool inside =
        position + row >= first && position + row < end && column * kElements < size;
    const auto* from = inside ? data + row * pool.position_stride + column * kElements : data;
    copy_async_or_zero(Fp8 ? tile.at + static_cast<uint32_t>(index * 16) : tile.chunk(row, column),
                       from, inside);
  }
}

// Codes of a tile as elements, in the places of a SharedTile.
template <class T, int D>
__device__ __forceinline__ void widen_tile(T* to, const uint8_t* from) {
  constexpr int kChunks = D / 16;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int i = 0; i < kTile * kChunks / kWarpThreads; ++i) {
    const int index = i * kWarpThreads + lane, row = index / kChunks, column = index % kChunks;
    uint4 wide[2];
    widen<T>(*reinterpret_cast<const uint4*>(from + index * 16), wide);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* place = to + row * D + ((2 * column + half) ^ (row & 7)) * 8;
      *reinterpret_cast<uint4*>(place) = wide[half];
    }
  }
}

// The row and 16 of the heads of a group that a block has.
struct Work {
  int64_t row, group;
  int64_t head;    // the first of them
  int heads;       // so many, at most 16
  int first, end;  // positions
};

template <class T>
__device__ __forceinline__ Work work_of(const PagedAttention& a, int64_t row) {
  const int64_t of_group = a.heads / a.groups, tiles = (of_group + kTile - 1) / kTile;
  Work w;
  w.row = row;
  w.group = blockIdx.y / tiles;
  const int64_t before = blockIdx.y % tiles * kTile;
  w.head = w.group * of_group + before;
  w.heads = static_cast<int>(min(int64_t{kTile}, of_group - before));
  w.end = a.lengths[row];
  w.first = a.window_left < 0 ? 0 : max(0, w.end - 1 - static_cast<int>(a.window_left));
  return w;
}

// Fragments of the queries; heads and features that are not there are zero.
template <class T, int D>
__device__ __forceinline__ void load_queries(uint32_t (&q)[D / 16][4], const PagedAttention& a,
                                             const Work& w) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const T* query = static_cast<const T*>(a.query) + (w.row * a.heads + w.head) * a.key_size;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = lane / 4 + i % 2 * 8, feature = 16 * step + lane % 4 * 2 + i / 2 * 8;
      q[step][i] = head < w.heads && feature < a.key_size
                       ? *reinterpret_cast<const uint32_t*>(query + head * a.key_size + feature)
                       : 0u;
    }
  }
}

// What a warp has seen of heads lane / 4 and lane / 4 + 8; of the sums a thread has its own share.
template <int D>
struct Seen {
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  float values[D / 8][4] = {};
};

template <class T, int D>
__device__ __forceinline__ void attend_tile(Seen<D>& seen, const uint32_t (&q)[D / 16][4],
                                            const SharedTile<T, D>& keys,
                                            const SharedTile<T, D>& values, int position,
                                            const Work& w, float scale, float cap) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  float scores[2][4] = {};
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t b[4];
    keys.load_b_of_rows(b, 0, step);
    mma<T>(scores[0], q[step], b[0], b[1]);
    mma<T>(scores[1], q[step], b[2], b[3]);
  }
  uint32_t p[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // heads
    float most = seen.most[half];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[i / 2][2 * half + i % 2];
      const int at = position + i / 2 * 8 + lane % 4 * 2 + i % 2;
      score *= scale;
      if (cap > 0.0f) score = cap * tanhf(score / cap);
      score = at >= w.first && at < w.end ? score * kLog2E : -INFINITY;
      most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    // Of a tile in which nothing is seen: any number in place of -infinity minus itself
    const float base = most == -INFINITY ? 0.0f : most;
    const float kept = power_of_two(seen.most[half] - base);
    seen.most[half] = most;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[i / 2][2 * half + i % 2];
      score = power_of_two(score - base);
      sum += score;
    }
    seen.sum[half] = seen.sum[half] * kept + sum;
#pragma unroll
    for (int column = 0; column < D / 8; ++column) {
      seen.values[column][2 * half] *= kept;
      seen.values[column][2 * half + 1] *= kept;
    }
    p[half] = pack_two<T>(scores[0][2 * half], scores[0][2 * half + 1]);
    p[2 + half] = pack_two<T>(scores[1][2 * half], scores[1][2 * half + 1]);
  }
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t b[4];
    values.load_b(b, 0, step);
    mma<T>(seen.values[2 * step], p, b[0], b[1]);
    mma<T>(seen.values[2 * step + 1], p, b[2], b[3]);
  }
}

// A warp's share of tiles: those of [begin, end) from `begin` + its number on, every kWarps-th.
template <class T, int D, bool Fp8>
__device__ __forceinline__ void attend_tiles(Seen<D>& seen, WarpRing<T, D, Fp8>& ring,
                                             const PagedAttention& a, const Work& w, int begin,
                                             int end) {
  constexpr int kStages = WarpRing<T, D, Fp8>::kStages;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int32_t* blocks = a.block_table + a.sequences[w.row] * a.table_stride;
  const int size = static_cast<int>(a.block_size);
  const auto start = [&](int tile, int stage) {
    if (tile < end) {
      const int position = tile * kTile;
      const int64_t block = blocks[position / size], offset = position % size;
      const auto place = [&](const PagedPool& pool) {
        return block * pool.block_stride + offset * pool.position_stride +
               w.group * pool.group_stride;
      };
      fetch<T, D, Fp8>(ring.keys[stage], a.keys, place(a.keys), a.key_size, position, w.first,
                       w.end);
      fetch<T, D, Fp8>(ring.values[stage], a.values, place(a.values), a.value_size, position,
                       w.first, w.end);
    }
    end_copy_group();
  };
  int next = begin + warp;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage, next += kWarps) start(next, stage);
  uint32_t q[D / 16][4];
  load_queries<T, D>(q, a, w);
  const float scale = static_cast<float>(a.scale) * (Fp8 ? a.keys.scale[w.group] : 1.0f);
  const float cap = static_cast<float>(a.softcap);
  int stage = 0, ahead = kStages - 1;
  for (int tile = begin + warp; tile < end; tile += kWarps, next += kWarps) {
    wait_for_copies<kStages - 2>();
    __syncwarp();
    start(next, ahead);
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    const void *keys = ring.keys[stage], *values = ring.values[stage];
    if constexpr (Fp8) {
      widen_tile<T, D>(ring.wide[0], ring.keys[stage]);
      widen_tile<T, D>(ring.wide[1], ring.values[stage]);
      __syncwarp();
      keys = ring.wide[0];
      values = ring.wide[1];
    }
    attend_tile<T, D>(seen, q, SharedTile<T, D>(keys), SharedTile<T, D>(values), tile * kTile, w,
                      scale, cap);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if constexpr (Fp8) __syncwarp();
  }
}

// Adds parts in their order; what is not there has a maximum of -infinity.
struct Sum {
  float most = -INFINITY, sum = 0.0f, value = 0.0f;

  __device__ __forceinline__ void add(float other_most, float other_sum, float other_value) {
    const float larger = fmaxf(most, other_most), base = larger == -INFINITY ? 0.0f : larger;
    const float kept = power_of_two(most - base), weight = power_of_two(other_most - base);
    sum = sum * kept + other_sum * weight;
    value = value * kept + other_value * weight;
    most = larger;
  }
};

// By the blocks of the cluster behind those of rows.
__device__ __forceinline__ void fetch_ahead(const PagedAttention& a, int64_t own_blocks) {
  constexpr int64_t kPiece = 2048;
  const int64_t block = (int64_t{blockIdx.x} - own_blocks) * gridDim.y + blockIdx.y,
                blocks = (int64_t{gridDim.x} - own_blocks) * gridDim.y;
  for (int64_t at = (block * kBlock + threadIdx.x) * kPiece; at < a.ahead_bytes;
       at += blocks * kBlock * kPiece) {
    const char* from = static_cast<const char*>(a.ahead) + at;
    const uint32_t bytes = static_cast<uint32_t>(min(kPiece, a.ahead_bytes - at)) & ~15u;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  }
}

// A block of a cluster of `splits` has a share of the tiles of 16 heads of a row.
template <class T, int D, bool Fp8>
__global__ void __launch_bounds__(kBlock, D == 256 ? 1 : 2)
    paged_tiles_kernel(PagedAttention a, int splits) {
  let_next_kernel_begin();
  if (const int64_t own_blocks = a.rows * splits; blockIdx.x >= own_blocks)
    return fetch_ahead(a, own_blocks);
  extern __shared__ __align__(128) unsigned char raw[];
  auto& memory = *reinterpret_cast<Memory<T, D, Fp8>*>(raw);
  const int split = static_cast<int>(blockIdx.x) % splits;
  const Work w = work_of<T>(a, blockIdx.x / static_cast<unsigned>(splits));
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads,
            warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int tile = w.first / kTile, tiles = (w.end + kTile - 1) / kTile - tile;
  const int share = (tiles + splits - 1) / splits, begin = tile + split * share;
  Seen<D> seen;
  attend_tiles<T, D, Fp8>(seen, memory.rings[warp], a, w, begin, min(begin + share, tile + tiles));
  wait_for_copies<0>();
  __syncthreads();  // the rings are free

  Part<D>& own = memory.parts.of_warps[warp];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = lane / 4 + 8 * half;
    if (head >= w.heads) continue;
    float sum = seen.sum[half];
    sum += __shfl_xor_sync(__activemask(), sum, 1);
    sum += __shfl_xor_sync(__activemask(), sum, 2);
    if (lane % 4 == 0) {
      own.most[head] = seen.most[half];
      own.sum[head] = sum;
    }
#pragma unroll
    for (int column = 0; column < D / 8; ++column)
      *reinterpret_cast<float2*>(&own.values[head][column * 8 + lane % 4 * 2]) = {
          seen.values[column][2 * half], seen.values[column][2 * half + 1]};
  }
  __syncthreads();

  Part<D>& whole = memory.parts.whole;
  const auto sum_of_warps = [&](int head, int feature) {
    Sum all;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const Part<D>& part = memory.parts.of_warps[i];
      all.add(part.most[head], part.sum[head], part.values[head][feature]);
    }
    return all;
  };
  const auto finish = [&](int head, int feature, Sum all) {
    if (a.sinks != nullptr)
      all.add(static_cast<const float*>(a.sinks)[w.head + head] * kLog2E, 1.0f, 0.0f);
    const float scale = Fp8 ? a.values.scale[w.group] : 1.0f;
    // A row of no positions is zero.
    const float value = w.end > 0 ? scale * all.value / all.sum : 0.0f;
    store_as(static_cast<T*>(a.out)[(w.row * a.heads + w.head + head) * a.value_size + feature],
             value);
  };
  const int size = static_cast<int>(a.value_size), elements = w.heads * size;
  for (int i = static_cast<int>(threadIdx.x); i < elements; i += kBlock) {
    const int head = i / size, feature = i % size;
    const Sum all = sum_of_warps(head, feature);
    if (splits == 1) {
      finish(head, feature, all);
      continue;
    }
    whole.values[head][feature] = all.value;
    if (feature == 0) {
      whole.most[head] = all.most;
      whole.sum[head] = all.sum;
    }
  }
  if (splits == 1) return;
  sm90::cluster_sync();
  const auto there = [&](const float& of_whole, int block) {
    float value;
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %1, %2;\n"
        "ld.shared::cluster.f32 %0, [at];\n}"
        : "=f"(value)
        : "r"(sm90::shared_address(&of_whole)), "r"(block)
        : "memory");
    return value;
  };
  for (int i = split * kBlock + static_cast<int>(threadIdx.x); i < elements; i += splits * kBlock) {
    const int head = i / size, feature = i % size;
    Sum all;
    for (int block = 0; block < splits; ++block)
      all.add(there(whole.most[head], block), there(whole.sum[head], block),
              there(whole.values[head][feature], block));
    finish(head, feature, all);
  }
  sm90::cluster_sync();  // others may still read this block's memory
}

template <class T, int D, bool Fp8>
void start(const PagedAttention& args, void* stream) {
  const auto kernel = paged_tiles_kernel<T, D, Fp8>;
  constexpr size_t kBytes = sizeof(Memory<T, D, Fp8>);
  MEGATRON_ASSERT(allow_shared_memory(kernel, kBytes), "no shared memory for paged attention");
  const int64_t tiles = args.groups * ((args.heads / args.groups + kTile - 1) / kTile);
  // Two blocks are resident on each multiprocessor; another two wait, since lengths differ.
  constexpr int64_t kWanted = 4 * 132;
  int splits = 1;
  while (splits < kMostSplits && args.rows * tiles * splits * 2 <= kWanted) splits *= 2;
  cudaLaunchConfig_t config{};
  const int64_t clusters = args.rows + (args.ahead != nullptr ? 1 : 0);
  config.gridDim = dim3(static_cast<unsigned>(clusters * splits), static_cast<unsigned>(tiles));
  config.blockDim = dim3(kBlock);
  config.dynamicSmemBytes = kBytes;
  config.stream = as_stream(stream);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args, splits), "paged attention");
}

}  // namespace

bool has_paged_tiles(const PagedAttention& args) {
  const int64_t chunk = args.keys.scale != nullptr ? 16 : 8;
  return is_hopper() && (args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16) &&
         args.key_size == args.value_size && args.key_size <= 256 && args.key_size % chunk == 0 &&
         args.block_size % kTile == 0 && has_aligned_heads(args.keys) &&
         has_aligned_heads(args.values) && reinterpret_cast<uintptr_t>(args.query) % 4 == 0;
}

void paged_tiles_cuda(const PagedAttention& args, void* stream) {
  const auto with_size = [&](auto type, auto fp8) {
    using T = decltype(type);
    constexpr bool kFp8 = decltype(fp8)::value;
    if (args.key_size <= 64) {
      start<T, 64, kFp8>(args, stream);
    } else if (args.key_size <= 128) {
      start<T, 128, kFp8>(args, stream);
    } else {
      start<T, 256, kFp8>(args, stream);
    }
  };
  const auto with_type = [&](auto type) {
    if (args.keys.scale != nullptr) {
      with_size(type, std::true_type());
    } else {
      with_size(type, std::false_type());
    }
  };
  if (args.dtype == DType::kBFloat16) {
    with_type(__nv_bfloat16{});
  } else {
    with_type(__half{});
  }
}

}  // namespace megatron
