// Note [Paged attention by tiles]
// Decoding reads keys and values once. The queries of a group of heads are columns of products on
// tensor cores, whose rows are positions (scores) and features (sums of values), so that 8 queries
// fill them; where fewer heads share keys, rows of one text that follow each other (a short prompt,
// drafts) are columns of it, too. A warp takes tiles of 16 positions, with a ring of its own that
// cp.async fills, so that warps never wait for each other inside the loop; what they have seen is
// added in the order of the warps. Where sequences and groups are too few for the device, the
// positions of one are divided over the blocks of a cluster, which add their parts in order through
// shared memory: no scratch memory, no second kernel, and no sum whose order depends on timing.
#include <cuda_fp8.h>

#include <algorithm>
#include <climits>
#include <cmath>

#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/kernels/detail/mma_tiles.cuh"
#include "megatron/kernels/detail/paged_pool.h"
#include "megatron/kernels/detail/sm90.cuh"

namespace megatron {
namespace {

constexpr int kWarps = 4, kTile = 16, kMostSplits = 8;
constexpr int kBlock = kWarps * kWarpThreads;
constexpr int kEight = 8;  // queries, columns of a product

// Heads are padded to D features by zeros.
template <class T, int D, bool Fp8>
struct WarpRing {
  using Stored = std::conditional_t<Fp8, uint8_t, T>;
  static constexpr int kStages = D == 64 ? (Fp8 ? 8 : 6) : (Fp8 ? 4 : 3);
  Stored keys[kStages][kTile * D], values[kStages][kTile * D];
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
template <int D, int Queries>
struct Part {
  float most[Queries], sum[Queries];
  float values[Queries][D + D / 16];  // place_of_sum()
};
template <class T, int D, bool Fp8, int Eights>
union Memory {
  WarpRing<T, D, Fp8> rings[kWarps];
  struct {
    Part<D, kEight * Eights> of_warps[kWarps];
    Part<D, kEight * Eights> whole;
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

// What a block computes at once: heads of a group in some rows of one text. Queries: row by row,
// head by head, at most 8 Eights.
template <int Eights>
struct Work {
  int64_t row, group;
  int64_t head;           // the first of them
  int heads;              // so many
  int rows;               // so many, behind each other
  int first, end;         // positions that are read
  int window;             // positions before its own that a query sees
  const int32_t* blocks;  // of the last row
  // Query 8 i + 2 (lane % 4) + j sees positions before this.
  int seen_end[Eights][2];

  __device__ __forceinline__ int queries() const { return rows * heads; }
  __device__ __forceinline__ int seen_first(int end_of_query) const {
    return max(0, end_of_query - 1 - window);
  }
  // Whether all queries see all of these positions.
  __device__ __forceinline__ bool is_seen_by_all(int begin, int behind) const {
    return begin >= seen_first(end) && behind <= end - rows + 1;
  }
};

// How many rows from `row` on, at most `most`, are positions behind each other of one text: the
// next one's table has the block of a row's own position, too. By all lanes.
__device__ __forceinline__ int rows_of_text(const PagedAttention& a, int64_t row, int most) {
  const int place = static_cast<int>(threadIdx.x) % kWarpThreads;
  bool goes_on = false;
  if (place + 1 < most) {
    const int64_t own = row + place;
    const int length = a.lengths[own];
    if (length > 0 && a.lengths[own + 1] == length + 1) {
      const int64_t block = (length - 1) / a.block_size;
      goes_on = a.block_table[a.sequences[own] * a.table_stride + block] ==
                a.block_table[a.sequences[own + 1] * a.table_stride + block];
    }
  }
  return __ffs(static_cast<int>(~__ballot_sync(~0u, goes_on)));
}

// Of up to `most` rows from `row` on. By all lanes.
template <int Eights>
__device__ __forceinline__ Work<Eights> work_of(const PagedAttention& a, int64_t row, int most) {
  constexpr int kQueries = kEight * Eights;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t of_group = a.heads / a.groups, tiles = (of_group + kQueries - 1) / kQueries;
  Work<Eights> w;
  w.row = row;
  w.group = blockIdx.y / tiles;
  const int64_t before = blockIdx.y % tiles * kQueries;
  w.head = w.group * of_group + before;
  w.heads = static_cast<int>(min(int64_t{kQueries}, of_group - before));
  w.rows = most > 1 ? rows_of_text(a, row, most) : 1;
  const int64_t last = row + w.rows - 1;
  w.end = a.lengths[last];
  w.blocks = a.block_table + a.sequences[last] * a.table_stride;
  w.window = a.window_left < 0 ? INT_MAX : static_cast<int>(a.window_left);
  w.first = w.seen_first(w.end - w.rows + 1);
#pragma unroll
  for (int i = 0; i < Eights; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int behind = w.rows - 1 - (kEight * i + lane % 4 * 2 + j) / w.heads;
      w.seen_end[i][j] = w.end - max(behind, 0);
    }
  }
  return w;
}

// Where query 8 i + lane / 4 lies; null: it is not there.
template <class T, int Eights>
__device__ __forceinline__ const T* find_query(const PagedAttention& a, const Work<Eights>& w,
                                               int i) {
  const int query = kEight * i + static_cast<int>(threadIdx.x) % kWarpThreads / 4,
            row = query / w.heads;
  if (query >= w.queries()) return nullptr;
  return static_cast<const T*>(a.query) +
         ((w.row + row) * a.heads + w.head + query - row * w.heads) * a.key_size;
}

// The queries as b's of mma(); those and features that are not there are zero.
template <class T, int D, int Eights>
__device__ __forceinline__ void load_queries(uint32_t (&q)[Eights][D / 16][2],
                                             const PagedAttention& a, const Work<Eights>& w) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int i = 0; i < Eights; ++i) {
    const T* query = find_query<T>(a, w, i);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int feature = 16 * step + lane % 4 * 2 + j * 8;
        q[i][step][j] = query != nullptr && feature < a.key_size
                            ? *reinterpret_cast<const uint32_t*>(query + feature)
                            : 0u;
      }
    }
  }
}

// The same in fp16 for attend_codes(), in its order of features: times a power of two that makes
// the largest of a query nearly as large as fp16 allows, so that none is lost. `scale` of query
// 8 i + 2 (lane % 4) + j is multiplied by its inverse.
template <class T, int D, int Eights>
__device__ __forceinline__ void load_queries_of_codes(uint32_t (&q)[Eights][D / 16][2],
                                                      float (&scale)[Eights][2],
                                                      const PagedAttention& a,
                                                      const Work<Eights>& w) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int eight = 0; eight < Eights; ++eight) {
    const T* query = find_query<T>(a, w, eight);
    float numbers[D / 4], most = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const int feature = (lane % 4 + i / 8 * 4) * 16 + i % 8 * 2;
      const bool there = query != nullptr && feature < a.key_size;
      T two[2] = {};
      if (there) memcpy(two, query + feature, sizeof two);
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
    const float factor = ldexpf(1.0f, -exponent), undo = ldexpf(1.0f, exponent);
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
      q[eight][i / 2][i % 2] =
          pack_two<__half>(numbers[2 * i] * factor, numbers[2 * i + 1] * factor);
#pragma unroll
    for (int j = 0; j < 2; ++j) scale[eight][j] *= __shfl_sync(~0u, undo, (lane % 4 * 2 + j) * 4);
  }
}

// What a warp has seen of queries 8 i + 2 (lane % 4) + j; of the sums a thread has its own share.
template <int D, int Eights>
struct Seen {
  float most[Eights][2], sum[Eights][2] = {};
  float values[Eights][D / 16][4] = {};

  __device__ __forceinline__ Seen() {
#pragma unroll
    for (int i = 0; i < Eights; ++i) most[i][0] = most[i][1] = -INFINITY;
  }
};

// The largest of the lanes that have the same columns.
__device__ __forceinline__ float largest_of_columns(float x) {
#pragma unroll
  for (int step = 4; step < kWarpThreads; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Scores [16, 8] of a tile, a d of mma() for each eight, as probabilities of type P, relative to
// the largest so far, a b each. `scale`: of queries 8 i + 2 (lane % 4) + j.
template <class P, int D, int Eights>
__device__ __forceinline__ void weigh(Seen<D, Eights>& seen, uint32_t (&p)[Eights][2],
                                      float (&scores)[Eights][4], int position,
                                      const Work<Eights>& w, const float (&scale)[Eights][2],
                                      float cap) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int i = 0; i < 4 * Eights; ++i) {
    float& score = scores[i / 4][i % 4];
    const float scaled = score * scale[i / 4][i % 2];
    score = kLog2E * (cap > 0.0f ? cap * tanhf(scaled / cap) : scaled);
  }
  if (!w.is_seen_by_all(position, position + kTile)) {
#pragma unroll
    for (int i = 0; i < 4 * Eights; ++i) {
      const int at = position + i % 4 / 2 * 8 + lane / 4, end = w.seen_end[i / 4][i % 2];
      if (at < w.seen_first(end) || at >= end) scores[i / 4][i % 4] = -INFINITY;
    }
  }
  float most[Eights][2];
  bool is_larger = false;
#pragma unroll
  for (int i = 0; i < 2 * Eights; ++i) {
    const float before = seen.most[i / 2][i % 2];
    most[i / 2][i % 2] = fmaxf(before, fmaxf(scores[i / 2][i % 2], scores[i / 2][i % 2 + 2]));
    is_larger = is_larger || most[i / 2][i % 2] > before;
  }
  // Few tiles have a larger score than all before; others multiply by 1.
  if (__any_sync(~0u, is_larger)) {
#pragma unroll
    for (int i = 0; i < 2 * Eights; ++i) {
      float& before = seen.most[i / 2][i % 2];
      const float now = largest_of_columns(most[i / 2][i % 2]);
      const float kept = power_of_two(before - finite_base(now));
      before = now;
      seen.sum[i / 2][i % 2] *= kept;
#pragma unroll
      for (int tile = 0; tile < D / 16; ++tile) {
        seen.values[i / 2][tile][i % 2] *= kept;
        seen.values[i / 2][tile][i % 2 + 2] *= kept;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Eights; ++i) {
    const float base[2] = {finite_base(seen.most[i][0]), finite_base(seen.most[i][1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* two = scores[i] + 2 * half;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        two[j] = power_of_two(two[j] - base[j]);
        seen.sum[i][j] += two[j];
      }
      p[i][half] = transposed(pack_two<P>(two[0], two[1]));
    }
  }
}

// Products go to two sums by turns, so that one waits less for the one before.
template <int Eights>
struct Scores {
  float of_turn[2][Eights][4] = {};

  // Those of both.
  __device__ __forceinline__ float (&added())[Eights][4] {
#pragma unroll
    for (int i = 0; i < 4 * Eights; ++i) of_turn[0][i / 4][i % 4] += of_turn[1][i / 4][i % 4];
    return of_turn[0];
  }
};

template <class T, int D, int Eights>
__device__ __forceinline__ void attend_tile(Seen<D, Eights>& seen,
                                            const uint32_t (&q)[Eights][D / 16][2],
                                            const SharedTile<T, D>& keys,
                                            const SharedTile<T, D>& values, int position,
                                            const Work<Eights>& w, const float (&scale)[Eights][2],
                                            float cap) {
  Scores<Eights> scores;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[4];
    keys.load_a(a, 0, step);
#pragma unroll
    for (int i = 0; i < Eights; ++i)
      mma<T>(scores.of_turn[step % 2][i], a, q[i][step][0], q[i][step][1]);
  }
  uint32_t p[Eights][2];
  weigh<T>(seen, p, scores.added(), position, w, scale, cap);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[4];
    values.load_a_of_columns(a, 0, step);
#pragma unroll
    for (int i = 0; i < Eights; ++i) mma<T>(seen.values[i][step], a, p[i][0], p[i][1]);
  }
}

// The same of a tile of codes of E4M3, in products of fp16. A sum over features may take them in
// any order, and so may the rows of values: each thread reads pieces of 16 codes of its positions,
// and they are its parts of the operands. Of step 4 i + j it has features 16 (lane % 4 + 4 i) + 4 j
// and the next three, and of values row n of eight 16 m + j is feature 16 (n + 8 m) + j (of heads
// of 64 features 8 n + j).
template <int D, int Eights>
__device__ __forceinline__ void attend_codes(Seen<D, Eights>& seen,
                                             const uint32_t (&q)[Eights][D / 16][2],
                                             const uint8_t (&keys)[kTile * D],
                                             const uint8_t (&values)[kTile * D], int position,
                                             const Work<Eights>& w, const float (&scale)[Eights][2],
                                             float cap) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  Scores<Eights> scores;
#pragma unroll
  for (int i = 0; i < D / 64; ++i) {
    uint32_t words[2][4];  // of positions lane / 4 and lane / 4 + 8
#pragma unroll
    for (int half = 0; half < 2; ++half)
      memcpy(words[half], keys + 16 * place_of_piece<D>(lane / 4 + 8 * half, lane % 4 + 4 * i),
             sizeof words[half]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t a[4] = {halves_of(words[0][j] & 0xffffu), halves_of(words[1][j] & 0xffffu),
                             halves_of(words[0][j] >> 16), halves_of(words[1][j] >> 16)};
#pragma unroll
      for (int e = 0; e < Eights; ++e)
        mma<__half>(scores.of_turn[j % 2][e], a, q[e][4 * i + j][0], q[e][4 * i + j][1]);
    }
  }
  uint32_t p[Eights][2];
  weigh<__half>(seen, p, scores.added(), position, w, scale, cap);
  constexpr int kWords = D == 64 ? 2 : 4;  // of a position, with 4 codes each
#pragma unroll
  for (int m = 0; m < (D + 127) / 128; ++m) {
    uint32_t rows[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane % 4 * 2 + i % 2 + i / 2 * 8, first = 4 * kWords * (lane / 4 + 8 * m);
      memcpy(rows[i], values + 16 * place_of_piece<D>(row, first / 16) + first % 16,
             sizeof rows[i]);
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
#pragma unroll
      for (int two = 0; two < 2; ++two) {  // positions of both rows side by side
        const uint32_t order = two == 0 ? 0x5140 : 0x7362;
        const uint32_t low = __byte_perm(rows[0][word], rows[1][word], order),
                       high = __byte_perm(rows[2][word], rows[3][word], order);
        const uint32_t a[4] = {halves_of(low & 0xffffu), halves_of(low >> 16),
                               halves_of(high & 0xffffu), halves_of(high >> 16)};
#pragma unroll
        for (int e = 0; e < Eights; ++e)
          mma<__half>(seen.values[e][2 * (m * kWords + word) + two], a, p[e][0], p[e][1]);
      }
    }
  }
}

// The feature of row `row` of the eight `eight` of a warp's sums.
template <int D, bool Fp8>
__device__ __forceinline__ int feature_of(int eight, int row) {
  if constexpr (!Fp8) return eight * 8 + row;
  if constexpr (D == 64) return row * 8 + eight;
  return (row + eight / 16 * 8) * 16 + eight % 16;
}

// A warp's share of tiles: those of [begin, end) from `begin` + its number on, every kWarps-th.
template <class T, int D, bool Fp8, int Eights>
__device__ __forceinline__ void attend_tiles(Seen<D, Eights>& seen, WarpRing<T, D, Fp8>& ring,
                                             const PagedAttention& a, const Work<Eights>& w,
                                             int begin, int end) {
  constexpr int kStages = WarpRing<T, D, Fp8>::kStages;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int size = static_cast<int>(a.block_size);
  // Of a size that is a power of two, so that nothing is divided; else -1
  const int shift = __popc(size) == 1 ? __ffs(size) - 1 : -1;
  const auto start = [&](int tile, int stage) {
    if (tile < end) {
      const int position = tile * kTile, number = shift >= 0 ? position >> shift : position / size;
      const int64_t block = w.blocks[number], offset = position - number * size;
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
  uint32_t q[Eights][D / 16][2];
  float scale[Eights][2];
#pragma unroll
  for (int i = 0; i < 2 * Eights; ++i)
    scale[i / 2][i % 2] = static_cast<float>(a.scale) * (Fp8 ? a.keys.scale[w.group] : 1.0f);
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
      attend_codes<D>(seen, q, ring.keys[stage], ring.values[stage], tile * kTile, w, scale, cap);
    } else {
      attend_tile<T, D>(seen, q, SharedTile<T, D>(ring.keys[stage]),
                        SharedTile<T, D>(ring.values[stage]), tile * kTile, w, scale, cap);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// How much each of N parts counts that are relative to maxima of their own; what is not there has
// one of -infinity. Sums are added in the order of the parts.
template <int N>
struct Weights {
  float of[N], sums[N] = {};
  float most = -INFINITY, sum = 0.0f;

  __device__ __forceinline__ Weights() {
#pragma unroll
    for (int i = 0; i < N; ++i) of[i] = -INFINITY;
  }
  __device__ __forceinline__ void see(int i, float most_of_part, float sum_of_part) {
    of[i] = most_of_part;
    sums[i] = sum_of_part;
    most = fmaxf(most, most_of_part);
  }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      of[i] = power_of_two(of[i] - finite_base(most));
      sum += of[i] * sums[i];
    }
  }
};

// By the blocks of the cluster behind those of rows. The next product does not begin beside this
// kernel, whose memory would leave two of its blocks on one multiprocessor and none on another
// (Note [Products of few rows on a GPU]).
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

// What the cluster's blocks have seen of `w`, each of its share of the tiles, into `a.out`.
template <class T, int D, bool Fp8, int Eights>
__device__ __forceinline__ void attend(const PagedAttention& a, const Work<Eights>& w, int splits,
                                       Memory<T, D, Fp8, Eights>& memory) {
  const int split = static_cast<int>(blockIdx.x) % splits;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads,
            warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int tile = w.first / kTile, tiles = (w.end + kTile - 1) / kTile - tile;
  const int share = (tiles + splits - 1) / splits, begin = tile + split * share;
  Seen<D, Eights> seen;
  attend_tiles<T, D, Fp8>(seen, memory.rings[warp], a, w, begin, min(begin + share, tile + tiles));
  wait_for_copies<0>();
  __syncthreads();  // the rings are free

  auto& own = memory.parts.of_warps[warp];
#pragma unroll
  for (int i = 0; i < 2 * Eights; ++i) {
    const int query = kEight * (i / 2) + lane % 4 * 2 + i % 2;
    float sum = seen.sum[i / 2][i % 2];
#pragma unroll
    for (int step = 4; step < kWarpThreads; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (query >= w.queries()) continue;
    if (lane / 4 == 0) {
      own.most[query] = seen.most[i / 2][i % 2];
      own.sum[query] = sum;
    }
#pragma unroll
    for (int eight = 0; eight < D / 8; ++eight)
      own.values[query][place_of_sum(feature_of<D, Fp8>(eight, lane / 4))] =
          seen.values[i / 2][eight / 2][eight % 2 * 2 + i % 2];
  }
  __syncthreads();

  // Some threads for each query, side by side.
  constexpr int kThreads = kBlock / (kEight * Eights);
  const int query = static_cast<int>(threadIdx.x) / kThreads,
            thread = static_cast<int>(threadIdx.x) % kThreads,
            size = static_cast<int>(a.value_size);
  const bool is_there = query < w.queries();
  const int row = query / w.heads;
  const int64_t head = w.head + query - row * w.heads;
  T* out = static_cast<T*>(a.out) + ((w.row + row) * a.heads + head) * a.value_size;
  // A row of no positions is zero.
  const float scale = w.end == 0 ? 0.0f : Fp8 ? a.values.scale[w.group] : 1.0f;
  const auto factor = [&](float most, float sum) {  // of sums of values relative to `most`
    if (a.sinks == nullptr) return scale == 0.0f ? 0.0f : scale / sum;
    const float sink = static_cast<const float*>(a.sinks)[head] * kLog2E,
                larger = fmaxf(most, sink), kept = power_of_two(most - larger);
    return scale * kept / (sum * kept + power_of_two(sink - larger));
  };
  auto& whole = memory.parts.whole;
  if (is_there) {
    const auto& parts = memory.parts.of_warps;
    Weights<kWarps> weights;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) weights.see(i, parts[i].most[query], parts[i].sum[query]);
    weights.finish();
    const float last = splits == 1 ? factor(weights.most, weights.sum) : 1.0f;
    for (int feature = thread; feature < size; feature += kThreads) {
      const int place = place_of_sum(feature);
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) value += weights.of[i] * parts[i].values[query][place];
      if (splits == 1) {
        store_as(out[feature], last * value);
      } else {
        whole.values[query][place] = value;
      }
    }
    if (thread == 0) {
      whole.most[query] = weights.most;
      whole.sum[query] = weights.sum;
    }
  }
  if (splits == 1) return __syncthreads();
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
  if (is_there) {
    Weights<kMostSplits> weights;
#pragma unroll
    for (int i = 0; i < kMostSplits; ++i)
      if (i < splits) weights.see(i, there(whole.most[query], i), there(whole.sum[query], i));
    weights.finish();
    const float last = factor(weights.most, weights.sum);
    for (int feature = split * kThreads + thread; feature < size; feature += splits * kThreads) {
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < kMostSplits; ++i)
        if (i < splits)
          value += weights.of[i] * there(whole.values[query][place_of_sum(feature)], i);
      store_as(out[feature], last * value);
    }
  }
  sm90::cluster_sync();  // others may still read this block's memory
}

// Blocks of a multiprocessor.
template <int D, bool Fp8, int Eights>
constexpr int kResident = D == 256             ? 1
                          : Fp8 && Eights == 1 ? 3
                                               : 2;

// A cluster of `splits` blocks has `together` rows, which it takes text by text.
template <class T, int D, bool Fp8, int Eights>
__global__ void __launch_bounds__(kBlock, kResident<D, Fp8, Eights>)
    paged_tiles_kernel(PagedAttention a, int splits, int together) {
  const int64_t own_blocks = (a.rows + together - 1) / together * splits;
  if (blockIdx.x >= own_blocks) return fetch_ahead(a, own_blocks);
  extern __shared__ __align__(128) unsigned char raw[];
  auto& memory = *reinterpret_cast<Memory<T, D, Fp8, Eights>*>(raw);
  int64_t row = int64_t{blockIdx.x} / splits * together;
  const int64_t end = min(row + together, a.rows);
  while (row < end) {
    const Work<Eights> w = work_of<Eights>(a, row, static_cast<int>(end - row));
    attend(a, w, splits, memory);
    row += w.rows;
  }
}

template <class T, int D, bool Fp8, int Eights>
void start(const PagedAttention& args, void* stream) {
  const auto kernel = paged_tiles_kernel<T, D, Fp8, Eights>;
  constexpr size_t kBytes = sizeof(Memory<T, D, Fp8, Eights>);
  MEGATRON_ASSERT(allow_shared_memory(kernel, kBytes), "no shared memory for paged attention");
  constexpr int64_t kQueries = kEight * Eights;
  const int64_t of_group = args.heads / args.groups,
                tiles = args.groups * ((of_group + kQueries - 1) / kQueries),
                together = args.has_runs ? std::max<int64_t>(1, kQueries / of_group) : 1,
                clusters = (args.rows + together - 1) / together;
  // At most as many as surely run side by side: clusters do not fill every group of
  // multiprocessors. Of short texts, of which a block has few tiles, one each.
  constexpr int64_t kProcessors = 132;
  const int64_t wanted =
      args.has_runs ? kProcessors : kResident<D, Fp8, Eights> * kProcessors * 3 / 4;
  int splits = 1;
  while (splits < kMostSplits && clusters * tiles * splits * 2 <= wanted) splits *= 2;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>((clusters + (args.ahead != nullptr ? 1 : 0)) * splits),
           static_cast<unsigned>(tiles));
  config.blockDim = dim3(kBlock);
  config.dynamicSmemBytes = kBytes;
  config.stream = as_stream(stream);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args, splits, static_cast<int>(together)),
             "paged attention");
}

// Queries of a group, or of rows behind each other, fill one eight or two.
template <class T, int D, bool Fp8>
void start_eights(const PagedAttention& args, void* stream) {
  if (args.heads / args.groups > kEight || args.has_runs) {
    start<T, D, Fp8, 2>(args, stream);
  } else {
    start<T, D, Fp8, 1>(args, stream);
  }
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
      start_eights<T, 64, kFp8>(args, stream);
    } else if (args.key_size <= 128) {
      start_eights<T, 128, kFp8>(args, stream);
    } else {
      start_eights<T, 256, kFp8>(args, stream);
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
