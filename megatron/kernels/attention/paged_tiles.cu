// Note [Paged attention by tiles]
// Decoding reads keys and values once: all queries of a group of heads, up to 16, are rows of one
// product on tensor cores; where fewer heads share keys, rows of one text that follow each other
// (a short prompt, drafts) are rows of it, too. A warp takes tiles of 16 positions (two of codes at
// once, whose arithmetic would else wait for itself), with a ring of its own that cp.async
// fills, so that warps never wait for each other inside the loop; what they have seen is added in
// the order of the warps. Where sequences and groups are too few for the device, the positions of
// one are divided over the blocks of a cluster, which add their parts in order through shared
// memory: no scratch memory, no second kernel, and no sum whose order depends on timing.
#include <cuda_fp8.h>

#include <algorithm>
#include <climits>
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
  static constexpr int kStages = D == 64 ? (Fp8 ? 4 : 6) : (Fp8 ? 2 : 3);
  static constexpr int kTiles = Fp8 ? 2 : 1;  // of a stage
  Stored keys[kStages][kTiles][kTile * D], values[kStages][kTiles][kTile * D];
};

// A tile of E4M3 in shared memory, row by row, in pieces of 16 codes: the place of one. Loads of
// attend_codes() meet no bank twice.
template <int D>
__device__ __forceinline__ int place_of_piece(int row, int column) {
  const int turn = D == 64 ? row / 2 % 4 : (row / 2 % 4 * 2) ^ (row % 2 * 4);
  return row * (D / 16) + (column ^ turn);
}

// The place of a feature in a row of fp32 sums of a Part: a gap for every 16, for the banks' sake.
__device__ __forceinline__ int place_of_sum(int feature) { return feature + feature / 16; }

// What the block, or a split of a cluster, has seen. The sums are not yet divided by `sum`.
template <int D>
struct Part {
  float most[kTile], sum[kTile];
  float values[kTile][D + D / 16];  // place_of_sum()
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

// Two codes of E4M3 as numbers in fp16, which has them all.
__device__ __forceinline__ uint32_t halves_of(uint32_t codes) {
  const __half2_raw two =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  uint32_t word;
  memcpy(&word, &two, sizeof word);
  return word;
}

// Starts the copy of a tile of 16 positions; features behind those of a head and positions outside
// [first, end) become zeros.
template <class T, int D, bool Fp8>
__device__ __forceinline__ void fetch(void* to, const PagedPool& pool, int64_t place, int64_t size,
                                      int position, int first, int end) {
  constexpr int kChunks = D * (Fp8 ? 1 : 2) / 16, kElements = Fp8 ? 16 : 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const auto* data = static_cast<const std::conditional_t<Fp8, uint8_t, T>*>(pool.data) + place;
  const SharedTile<T, D> tile(to);
  const auto target = [&](int row, int column) {
    return Fp8 ? tile.at + static_cast<uint32_t>(place_of_piece<D>(row, column) * 16)
               : tile.chunk(row, column);
  };
  if (position >= first && position + kTile <= end && size == D) {  // all of it
    const int row = lane / kChunks, column = lane % kChunks;
    const auto* from = data + row * pool.position_stride + column * kElements;
#pragma unroll
    for (int i = 0; i < kTile * kChunks / kWarpThreads; ++i) {
      copy_async_or_zero(target(row + i * (kWarpThreads / kChunks), column), from, true);
      from += kWarpThreads / kChunks * pool.position_stride;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kTile * kChunks / kWarpThreads; ++i) {
    const int index = i * kWarpThreads + lane, row = index / kChunks, column = index % kChunks;
    const bool inside =
        position + row >= first && position + row < end && column * kElements < size;
    const auto* from = inside ? data + row * pool.position_stride + column * kElements : data;
    copy_async_or_zero(target(row, column), from, inside);
  }
}

// What a block has: 16 of the heads of a group of one row, or all of some rows of one text. Queries
// of the product: row by row, head by head.
struct Work {
  int64_t row, group;
  int64_t head;           // the first of them
  int heads;              // so many, at most 16
  int rows;               // so many, behind each other; 0: another block has them
  int first, end;         // positions that are read
  const int32_t* blocks;  // of the last row
  // Positions that queries lane / 4 and lane / 4 + 8 see.
  int seen_first[2], seen_end[2];

  __device__ __forceinline__ int queries() const { return rows * heads; }
};

// Whether `together` rows from `leader` on are positions behind each other of one text: the last
// row's table has the block of each row's own position, too. By all lanes.
__device__ __forceinline__ bool is_one_text(const PagedAttention& a, int64_t leader, int together) {
  const int place = min(static_cast<int>(threadIdx.x) % kWarpThreads, together - 1);
  const int length = a.lengths[leader + place];
  const int first = __shfl_sync(~0u, length, 0);
  if (first == 0 || !__all_sync(~0u, length == first + place)) return false;
  const int64_t block = (length - 1) / a.block_size;
  const int32_t own = a.block_table[a.sequences[leader + place] * a.table_stride + block],
                of_last =
                    a.block_table[a.sequences[leader + together - 1] * a.table_stride + block];
  return __all_sync(~0u, own == of_last);
}

// By all lanes. The first of as many rows as make up 16 queries has them all, if they are of one
// text.
template <class T>
__device__ __forceinline__ Work work_of(const PagedAttention& a, int64_t row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t of_group = a.heads / a.groups, tiles = (of_group + kTile - 1) / kTile;
  Work w;
  w.row = row;
  w.group = blockIdx.y / tiles;
  const int64_t before = blockIdx.y % tiles * kTile;
  w.head = w.group * of_group + before;
  w.heads = static_cast<int>(min(int64_t{kTile}, of_group - before));
  w.rows = 1;
  int64_t last = row;
  const int together = kTile / w.heads;
  const int64_t leader = row - row % together;
  if (together > 1 && leader + together <= a.rows && is_one_text(a, leader, together)) {
    w.rows = row == leader ? together : 0;
    last = leader + together - 1;
  }
  w.end = a.lengths[last];
  w.blocks = a.block_table + a.sequences[last] * a.table_stride;
  const int window = a.window_left < 0 ? INT_MAX : static_cast<int>(a.window_left);
  w.first = max(0, w.end - max(w.rows, 1) - window);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int behind = w.rows - 1 - (lane / 4 + 8 * half) / w.heads;
    w.seen_end[half] = w.end - max(behind, 0);
    w.seen_first[half] = max(0, w.seen_end[half] - 1 - window);
  }
  return w;
}

// Where queries lane / 4 and lane / 4 + 8 lie; null: they are not there.
template <class T>
__device__ __forceinline__ void find_queries(const T* (&query)[2], const PagedAttention& a,
                                             const Work& w) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_row = lane / 4 + half * 8, row = of_row / w.heads;
    query[half] = of_row < w.queries()
                      ? static_cast<const T*>(a.query) +
                            ((w.row + row) * a.heads + w.head + of_row - row * w.heads) * a.key_size
                      : nullptr;
  }
}

// Fragments of the queries; those and features that are not there are zero.
template <class T, int D>
__device__ __forceinline__ void load_queries(uint32_t (&q)[D / 16][4], const PagedAttention& a,
                                             const Work& w) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const T* query[2];
  find_queries(query, a, w);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int feature = 16 * step + lane % 4 * 2 + i / 2 * 8;
      q[step][i] = query[i % 2] != nullptr && feature < a.key_size
                       ? *reinterpret_cast<const uint32_t*>(query[i % 2] + feature)
                       : 0u;
    }
  }
}

// The same in fp16 for attend_codes(), in its order of features: times a power of two that makes
// the largest of a query nearly as large as fp16 allows, so that none is lost. `undo` is multiplied
// by its inverse.
template <class T, int D>
__device__ __forceinline__ void load_queries_of_codes(uint32_t (&q)[D / 16][4], float (&undo)[2],
                                                      const PagedAttention& a, const Work& w) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const T* query[2];
  find_queries(query, a, w);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float numbers[D / 4], most = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const int feature = (lane % 4 + i / 8 * 4) * 16 + i % 8 * 2;
      const bool there = query[half] != nullptr && feature < a.key_size;
      T two[2] = {};
      if (there) memcpy(two, query[half] + feature, sizeof two);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        numbers[2 * i + j] = static_cast<float>(two[j]);
        most = fmaxf(most, fabsf(numbers[2 * i + j]));
      }
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    // Between 2^14 and 2^15; a query of zeros, or of what is no number, stays as it is.
    const int exponent = most > 0.0f && most < INFINITY ? max(ilogbf(most), -100) - 14 : 0;
    const float factor = ldexpf(1.0f, -exponent);
    undo[half] *= ldexpf(1.0f, exponent);
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
      q[i / 2][half + i % 2 * 2] =
          pack_two<__half>(numbers[2 * i] * factor, numbers[2 * i + 1] * factor);
  }
}

// What a warp has seen of queries lane / 4 and lane / 4 + 8; of the sums a thread has its own
// share.
template <int D>
struct Seen {
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  float values[D / 8][4] = {};
};

// What scores are relative to: of a query that has seen nothing any number in place of -infinity
// minus itself.
__device__ __forceinline__ float base_of(float most) { return most == -INFINITY ? 0.0f : most; }

// Scores [16, 16] of each of N tiles as probabilities of type P, relative to the largest so far;
// `scores` as two d's of mma() a tile, `p` as an a. `scale`: of queries lane / 4 and lane / 4 + 8.
template <class P, int N, int D>
__device__ __forceinline__ void weigh(Seen<D>& seen, uint32_t (&p)[N][4], float (&scores)[2 * N][4],
                                      int position, const Work& w, const float (&scale)[2],
                                      float cap) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  if (cap > 0.0f) {
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) {
      float& score = scores[i / 4][i % 4];
      score = cap * tanhf(score * scale[i % 4 / 2] / cap);
    }
  }
  float most[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // queries
    most[half] = seen.most[half];
    const float factor = cap > 0.0f ? kLog2E : scale[half] * kLog2E;
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) {
      float& score = scores[i / 2][2 * half + i % 2];
      const int at = position + i / 2 * 8 + lane % 4 * 2 + i % 2;
      score = at >= w.seen_first[half] && at < w.seen_end[half] ? score * factor : -INFINITY;
      most[half] = fmaxf(most[half], score);
    }
    most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 1));
    most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 2));
  }
  // Few tiles have a larger score than all before; others multiply by 1.
  if (__any_sync(~0u, most[0] > seen.most[0] || most[1] > seen.most[1])) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float kept = power_of_two(seen.most[half] - base_of(most[half]));
      seen.most[half] = most[half];
      seen.sum[half] *= kept;
#pragma unroll
      for (int column = 0; column < D / 8; ++column) {
        seen.values[column][2 * half] *= kept;
        seen.values[column][2 * half + 1] *= kept;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = base_of(most[half]);
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) {
      float& score = scores[i / 2][2 * half + i % 2];
      score = power_of_two(score - base);
      seen.sum[half] += score;
    }
#pragma unroll
    for (int i = 0; i < 2 * N; ++i)
      p[i / 2][i % 2 * 2 + half] = pack_two<P>(scores[i][2 * half], scores[i][2 * half + 1]);
  }
}

template <class T, int D>
__device__ __forceinline__ void attend_tile(Seen<D>& seen, const uint32_t (&q)[D / 16][4],
                                            const SharedTile<T, D>& keys,
                                            const SharedTile<T, D>& values, int position,
                                            const Work& w, const float (&scale)[2], float cap) {
  float scores[2][4] = {};
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t b[4];
    keys.load_b_of_rows(b, 0, step);
    mma<T>(scores[0], q[step], b[0], b[1]);
    mma<T>(scores[1], q[step], b[2], b[3]);
  }
  uint32_t p[1][4];
  weigh<T, 1>(seen, p, scores, position, w, scale, cap);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t b[4];
    values.load_b(b, 0, step);
    mma<T>(seen.values[2 * step], p[0], b[0], b[1]);
    mma<T>(seen.values[2 * step + 1], p[0], b[2], b[3]);
  }
}

// The same of two tiles of codes of E4M3, in products of fp16. A sum over features may take them in
// any order, and so may the columns of values: each thread reads pieces of 16 codes of its rows,
// and they are its parts of the operands. Of step 4 i + j it has features 16 (lane % 4 + 4 i) + 4 j
// and the next three, and of tile 16 m + j of the values column n is feature 16 (n + 8 m) + j (of
// heads of 64 features 8 n + j).
template <int D>
__device__ __forceinline__ void attend_codes(Seen<D>& seen, const uint32_t (&q)[D / 16][4],
                                             const uint8_t (&keys)[2][kTile * D],
                                             const uint8_t (&values)[2][kTile * D], int position,
                                             const Work& w, const float (&scale)[2], float cap) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  float scores[4][4] = {};
#pragma unroll
  for (int i = 0; i < D / 64; ++i) {
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {  // positions
      const uint4 piece = *reinterpret_cast<const uint4*>(
          keys[eight / 2] + 16 * place_of_piece<D>(lane / 4 + 8 * (eight % 2), lane % 4 + 4 * i));
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        mma<__half>(scores[eight], q[4 * i + j], halves_of(words[j] & 0xffffu),
                    halves_of(words[j] >> 16));
    }
  }
  uint32_t p[2][4];
  weigh<__half, 2>(seen, p, scores, position, w, scale, cap);
  constexpr int kWords = D == 64 ? 2 : 4;  // of a row, with 4 codes each
#pragma unroll
  for (int m = 0; m < (D + 127) / 128; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t rows[4][kWords];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i % 2 + i / 2 * 8, first = 4 * kWords * (lane / 4 + 8 * m);
        memcpy(rows[i], values[half] + 16 * place_of_piece<D>(row, first / 16) + first % 16,
               sizeof rows[i]);
      }
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
#pragma unroll
        for (int two = 0; two < 2; ++two) {  // features of both rows side by side
          const uint32_t order = two == 0 ? 0x5140 : 0x7362;
          const uint32_t low = __byte_perm(rows[0][word], rows[1][word], order),
                         high = __byte_perm(rows[2][word], rows[3][word], order);
          const int tile = 4 * (m * kWords + word) + 2 * two;
          mma<__half>(seen.values[tile], p[half], halves_of(low & 0xffffu),
                      halves_of(high & 0xffffu));
          mma<__half>(seen.values[tile + 1], p[half], halves_of(low >> 16), halves_of(high >> 16));
        }
      }
    }
  }
}

// The feature of column `column` of tile `tile` of a warp's sums.
template <int D, bool Fp8>
__device__ __forceinline__ int feature_of(int tile, int column) {
  if constexpr (!Fp8) return tile * 8 + column;
  if constexpr (D == 64) return column * 8 + tile;
  return (column + tile / 16 * 8) * 16 + tile % 16;
}

// A warp's share of tiles: those of [begin, end) from `begin` + its number on, every kWarps-th.
template <class T, int D, bool Fp8>
__device__ __forceinline__ void attend_tiles(Seen<D>& seen, WarpRing<T, D, Fp8>& ring,
                                             const PagedAttention& a, const Work& w, int begin,
                                             int end) {
  constexpr int kStages = WarpRing<T, D, Fp8>::kStages, kTiles = WarpRing<T, D, Fp8>::kTiles;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int size = static_cast<int>(a.block_size);
  // Of a size that is a power of two, so that nothing is divided; else -1
  const int shift = __popc(size) == 1 ? __ffs(size) - 1 : -1;
  const auto start = [&](int tile, int stage) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int position = (tile * kTiles + i) * kTile;
      if (tile >= end) continue;
      // Behind the last position, in a block that need not be there, zeros come from the first one.
      const int known = position < w.end ? position : 0;
      const int number = shift >= 0 ? known >> shift : known / size;
      const int64_t block = w.blocks[number], offset = known - number * size;
      const auto place = [&](const PagedPool& pool) {
        return block * pool.block_stride + offset * pool.position_stride +
               w.group * pool.group_stride;
      };
      fetch<T, D, Fp8>(ring.keys[stage][i], a.keys, place(a.keys), a.key_size, position, w.first,
                       w.end);
      fetch<T, D, Fp8>(ring.values[stage][i], a.values, place(a.values), a.value_size, position,
                       w.first, w.end);
    }
    end_copy_group();
  };
  int next = begin + warp;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage, next += kWarps) start(next, stage);
  uint32_t q[D / 16][4];
  float scale[2];
  scale[0] = scale[1] = static_cast<float>(a.scale) * (Fp8 ? a.keys.scale[w.group] : 1.0f);
  if constexpr (Fp8) {
    load_queries_of_codes<T, D>(q, scale, a, w);
  } else {
    load_queries<T, D>(q, a, w);
  }
  const float cap = static_cast<float>(a.softcap);
  int stage = 0, ahead = kStages - 1;
  for (int tile = begin + warp; tile < end; tile += kWarps, next += kWarps) {
    wait_for_copies<kStages - 2>();
    __syncwarp();
    start(next, ahead);
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    if constexpr (Fp8) {
      attend_codes<D>(seen, q, ring.keys[stage], ring.values[stage], tile * 2 * kTile, w, scale,
                      cap);
    } else {
      attend_tile<T, D>(seen, q, SharedTile<T, D>(ring.keys[stage][0]),
                        SharedTile<T, D>(ring.values[stage][0]), tile * kTile, w, scale, cap);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
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

// A block of a cluster of `splits` has a share of the tiles of 16 queries.
template <class T, int D, bool Fp8>
__global__ void __launch_bounds__(kBlock, D == 256 ? 1
                                          : Fp8    ? 3
                                                   : 2)
    paged_tiles_kernel(PagedAttention a, int splits) {
  let_next_kernel_begin();
  if (const int64_t own_blocks = a.rows * splits; blockIdx.x >= own_blocks)
    return fetch_ahead(a, own_blocks);
  extern __shared__ __align__(128) unsigned char raw[];
  auto& memory = *reinterpret_cast<Memory<T, D, Fp8>*>(raw);
  const int split = static_cast<int>(blockIdx.x) % splits;
  const Work w = work_of<T>(a, blockIdx.x / static_cast<unsigned>(splits));
  if (w.rows == 0) return;  // so does the whole cluster
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads,
            warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  constexpr int kPositions = kTile * WarpRing<T, D, Fp8>::kTiles;
  const int tile = w.first / kPositions, tiles = (w.end + kPositions - 1) / kPositions - tile;
  const int share = (tiles + splits - 1) / splits, begin = tile + split * share;
  Seen<D> seen;
  attend_tiles<T, D, Fp8>(seen, memory.rings[warp], a, w, begin, min(begin + share, tile + tiles));
  wait_for_copies<0>();
  __syncthreads();  // the rings are free

  Part<D>& own = memory.parts.of_warps[warp];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = lane / 4 + 8 * half;
    if (query >= w.queries()) continue;
    float sum = seen.sum[half];
    sum += __shfl_xor_sync(__activemask(), sum, 1);
    sum += __shfl_xor_sync(__activemask(), sum, 2);
    if (lane % 4 == 0) {
      own.most[query] = seen.most[half];
      own.sum[query] = sum;
    }
#pragma unroll
    for (int tile_of = 0; tile_of < D / 8; ++tile_of) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        own.values[query][place_of_sum(feature_of<D, Fp8>(tile_of, lane % 4 * 2 + i))] =
            seen.values[tile_of][2 * half + i];
    }
  }
  __syncthreads();

  Part<D>& whole = memory.parts.whole;
  const auto sum_of_warps = [&](int query, int feature) {
    Sum all;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const Part<D>& part = memory.parts.of_warps[i];
      all.add(part.most[query], part.sum[query], part.values[query][place_of_sum(feature)]);
    }
    return all;
  };
  const auto finish = [&](int query, int feature, Sum all) {
    const int row = query / w.heads;
    const int64_t head = w.head + query - row * w.heads;
    if (a.sinks != nullptr) all.add(static_cast<const float*>(a.sinks)[head] * kLog2E, 1.0f, 0.0f);
    const float scale = Fp8 ? a.values.scale[w.group] : 1.0f;
    // A row of no positions is zero.
    const float value = w.end > 0 ? scale * all.value / all.sum : 0.0f;
    store_as(static_cast<T*>(a.out)[((w.row + row) * a.heads + head) * a.value_size + feature],
             value);
  };
  const int size = static_cast<int>(a.value_size), elements = w.queries() * size;
  for (int i = static_cast<int>(threadIdx.x); i < elements; i += kBlock) {
    const int query = i / size, feature = i % size;
    const Sum all = sum_of_warps(query, feature);
    if (splits == 1) {
      finish(query, feature, all);
      continue;
    }
    whole.values[query][place_of_sum(feature)] = all.value;
    if (feature == 0) {
      whole.most[query] = all.most;
      whole.sum[query] = all.sum;
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
    const int query = i / size, feature = i % size;
    Sum all;
    for (int block = 0; block < splits; ++block)
      all.add(there(whole.most[query], block), there(whole.sum[query], block),
              there(whole.values[query][place_of_sum(feature)], block));
    finish(query, feature, all);
  }
  sm90::cluster_sync();  // others may still read this block's memory
}

template <class T, int D, bool Fp8>
void start(const PagedAttention& args, void* stream) {
  const auto kernel = paged_tiles_kernel<T, D, Fp8>;
  constexpr size_t kBytes = sizeof(Memory<T, D, Fp8>);
  MEGATRON_ASSERT(allow_shared_memory(kernel, kBytes), "no shared memory for paged attention");
  const int64_t tiles = args.groups * ((args.heads / args.groups + kTile - 1) / kTile);
  // Two blocks are resident on each multiprocessor, of codes three; others wait, since lengths
  // differ.
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
