#include <cmath>

#include "megatron/kernels/attention/distance_attention.h"
#include "megatron/kernels/detail/mma_tiles.cuh"

namespace megatron {
namespace {

using Tiles = DistanceAttentionTiles;
constexpr int kWarps = Tiles::kWarps, kBlock = kWarps * kWarpThreads;
constexpr int kTile = Tiles::kTile, kHalf = Tiles::kHalf;
constexpr int kWindow = 2 * kHalf;  // distances of kHalf x kHalf scores, and one

// A warp owns Blocks times 16 rows.
template <int D>
constexpr int kBlocks = D == 64 ? 2 : 1;
template <int D>
constexpr int kOwned = kWarps * 16 * kBlocks<D>;
static_assert(kOwned<64> == Tiles::owned(64) && kOwned<128> == Tiles::owned(128));

// The rows of a sample.
struct Span {
  int first, count;
};
__device__ __forceinline__ Span span_of(const int32_t* offsets, int64_t sample, int64_t all) {
  if (offsets == nullptr) return {0, static_cast<int>(all)};
  return {offsets[sample], offsets[sample + 1] - offsets[sample]};
}

struct Place {
  int sample, head, first;  // of the rows that the block owns, in the sample
  Span queries, keys;
  int left, right;              // query i sees keys i - left ... i + right
  int warp, lane, group, pair;  // group: lane / 4, a row of a fragment; pair: 2 (lane % 4)
};
template <int D>
__device__ __forceinline__ Place place(const DistanceAttentionArgs& args) {
  Place p;
  p.sample = static_cast<int>(blockIdx.z);
  p.head = static_cast<int>(blockIdx.y);
  p.queries = span_of(args.query_offsets, p.sample, args.queries);
  p.keys = span_of(args.key_offsets, p.sample, args.keys);
  p.first = static_cast<int>(blockIdx.x) * kOwned<D>;
  constexpr int kAll = 1 << 29;
  p.left = args.window_left < 0 ? kAll : static_cast<int>(args.window_left);
  p.right = args.causal ? 0 : args.window_right < 0 ? kAll : static_cast<int>(args.window_right);
  p.warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  p.lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  p.group = p.lane / 4;
  p.pair = p.lane % 4 * 2;
  return p;
}

template <class T>
__device__ __forceinline__ T* row_of(const AttentionRows& rows, const Place& p, const Span& span,
                                     int position) {
  return static_cast<T*>(rows.data) + p.sample * rows.sample + p.head * rows.head +
         (span.first + position) * rows.position;
}

// Biases of owned rows and a tile's, for exponents of 2. Entry t is that of distance
// `nearest` + t; what no score has is 0.
template <int Count>
__device__ __forceinline__ void copy_biases(float (&to)[Count], const DistanceAttentionArgs& args,
                                            int64_t head, int64_t nearest) {
  const int64_t length = args.queries + args.keys - 1;
  for (int t = static_cast<int>(threadIdx.x); t < Count; t += kBlock) {
    const int64_t at = nearest + args.queries - 1 + t;
    const bool inside = args.bias != nullptr && at >= 0 && at < length;
    to[t] = inside ? args.bias[head * length + at] * kLog2E : 0.0f;
  }
}

// Starts the copy of `Rows` rows of a sample from `first` on into a tile.
template <int Rows, int D, class T>
__device__ __forceinline__ void copy_rows(T* to, const AttentionRows& rows, const Place& p,
                                          const Span& span, int first) {
  SharedTile<T, D>(to).template copy<Rows, kBlock>(row_of<T>(rows, p, span, first), rows.position,
                                                   span.count - first);
}

// Tiles of keys that some query of the block sees.
struct TileRange {
  int begin, end;
};
template <int D>
__device__ __forceinline__ TileRange tiles_of_keys(const Place& p) {
  const int last = min(p.first + kOwned<D>, p.queries.count) - 1;
  return {max(0, p.first - p.left) / kTile,
          (min(p.keys.count, last + p.right + 1) + kTile - 1) / kTile};
}
// Tiles of queries that see some key of the block.
template <int D>
__device__ __forceinline__ TileRange tiles_of_queries(const Place& p) {
  const int last = min(p.first + kOwned<D>, p.keys.count) - 1;
  return {max(0, p.first - p.right) / kTile,
          (min(p.queries.count, last + p.left + 1) + kTile - 1) / kTile};
}

// Starts the copy of a tile of keys and their values, and of their biases.
template <int D, class Memory>
__device__ __forceinline__ void fetch_keys(Memory& memory, const DistanceAttentionArgs& args,
                                           const Place& p, int tile) {
  const int first = tile * kTile;
  const int slot = tile % 2;
  copy_rows<kTile, D>(memory.k[slot], args.k, p, p.keys, first);
  copy_rows<kTile, D>(memory.v[slot], args.v, p, p.keys, first);
  copy_biases(memory.biases[slot], args, p.head, first - p.first - (kOwned<D> - 1));
  end_copy_group();
}

template <class T, int D>
struct ForwardMemory {
  T q[kOwned<D> * D];
  T k[2][kTile * D], v[2][kTile * D];
  float biases[2][kOwned<D> + kTile];
};

// A block owns queries and goes through the keys.
template <class T, int D>
__global__ void __launch_bounds__(kBlock, 2) forward_kernel(DistanceAttentionArgs args) {
  extern __shared__ __align__(16) unsigned char raw[];
  auto& memory = *reinterpret_cast<ForwardMemory<T, D>*>(raw);
  constexpr int kRows = kOwned<D>, kM = kBlocks<D>;
  const Place p = place<D>(args);
  if (p.first >= p.queries.count) return;
  const TileRange tiles = tiles_of_keys<D>(p);

  copy_rows<kRows, D>(memory.q, args.q, p, p.queries, p.first);
  fetch_keys<D>(memory, args, p, tiles.begin);

  const float scale = static_cast<float>(args.scale) * kLog2E;
  float out[kM][D / 8][4] = {};
  float most[kM][2], sum[kM][2] = {};
#pragma unroll
  for (int m = 0; m < kM; ++m) most[m][0] = most[m][1] = -INFINITY;
  const int own = p.warp * 16 * kM;  // the warp's first row of the block's

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    wait_for_copies<0>();
    __syncthreads();
    if (tile + 1 < tiles.end) fetch_keys<D>(memory, args, p, tile + 1);
    const SharedTile<T, D> q(memory.q), k(memory.k[tile % 2]), v(memory.v[tile % 2]);
    const float* biases = memory.biases[tile % 2];
    const int first = tile * kTile, nearest = p.first + own, last = nearest + 16 * kM - 1;
    // No query of the warp sees a key of the tile.
    if (first > last + p.right || first + kTile <= nearest - p.left) continue;

    float scores[kM][kTile / 8][4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) q.load_a(a[m], own + 16 * m, step);
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
        uint32_t b[4];
        k.load_b_of_rows(b, 16 * n, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma<T>(scores[m][2 * n], a[m], b[0], b[1]);
          mma<T>(scores[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
    const bool whole = first + kTile <= p.keys.count && first + kTile - 1 <= nearest + p.right &&
                       first >= last - p.left;
    uint32_t probabilities[kM][kTile / 8][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = own + 16 * m + 8 * half + p.group;
        const int begin = p.first + row - p.left,
                  end = min(p.keys.count, p.first + row + p.right + 1);
        float largest = most[m][half];
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + p.pair + e;
            float& score = scores[m][n][2 * half + e];
            score = score * scale + biases[column - row + kRows - 1];
            if (!whole && (first + column >= end || first + column < begin)) score = -INFINITY;
            largest = fmaxf(largest, score);
          }
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float base = largest == -INFINITY ? 0.0f : largest;
        const float factor = power_of_two(most[m][half] - base);
        most[m][half] = largest;
        float total = sum[m][half] * factor;
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
          const float left = power_of_two(scores[m][n][2 * half] - base),
                      right = power_of_two(scores[m][n][2 * half + 1] - base);
          total += left + right;
          probabilities[m][n][half] = pack_two<T>(left, right);
        }
        sum[m][half] = total;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          out[m][n][2 * half] *= factor;
          out[m][n][2 * half + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        v.load_b(b, 16 * step, n);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const uint32_t a[4] = {probabilities[m][2 * step][0], probabilities[m][2 * step][1],
                                 probabilities[m][2 * step + 1][0],
                                 probabilities[m][2 * step + 1][1]};
          mma<T>(out[m][2 * n], a, b[0], b[1]);
          mma<T>(out[m][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[m][half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const int row = p.first + own + 16 * m + 8 * half + p.group;
      if (row >= p.queries.count) continue;
      const float inverse = 1.0f / total;
      T* to = row_of<T>(args.out, p, p.queries, row) + p.pair;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            pack_two<T>(out[m][n][2 * half] * inverse, out[m][n][2 * half + 1] * inverse);
      if (p.pair == 0)
        args.lse[(p.sample * args.heads + p.head) * args.queries + row] =
            (most[m][half] + log2f(total)) / kLog2E;
    }
  }
}

// delta [b, n, s]: the sum over d of dout times out; a warp takes a row.
template <class T, int D>
__global__ void __launch_bounds__(kThreads) delta_kernel(DistanceAttentionArgs args, float* delta) {
  const int64_t rows = args.samples * args.heads * args.queries;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t index = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarpThreads;
  if (index >= rows) return;
  // Heads of a position lie next to each other.
  Place p;
  p.head = static_cast<int>(index % args.heads);
  p.sample = static_cast<int>(index / args.heads % args.samples);
  p.queries = span_of(args.query_offsets, p.sample, args.queries);
  const int position = static_cast<int>(index / args.heads / args.samples);
  if (position >= p.queries.count) return;
  const T* grad = row_of<T>(args.dout, p, p.queries, position);
  const T* out = row_of<T>(args.out, p, p.queries, position);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < D / kWarpThreads; ++i)
    sum += load_as<float>(grad[i * kWarpThreads + lane]) *
           load_as<float>(out[i * kWarpThreads + lane]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane == 0) delta[(p.sample * args.heads + p.head) * args.queries + position] = sum;
}

template <class T, int D>
struct KeyMemory {
  T k[kOwned<D> * D], v[kOwned<D> * D];
  T q[2][kTile * D], dout[2][kTile * D];
  float lse[2][kTile], delta[2][kTile];
  float biases[2][kOwned<D> + kTile];
};

// d += a b^T for the warp's rows of `a` and kHalf rows of `b`.
template <class T, int D, int M>
__device__ __forceinline__ void multiply_rows(float (&d)[M][kHalf / 8][4],
                                              const SharedTile<T, D>& a, int a_row,
                                              const SharedTile<T, D>& b, int b_row) {
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t left[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) a.load_a(left[m], a_row + 16 * m, step);
#pragma unroll
    for (int n = 0; n < kHalf / 16; ++n) {
      uint32_t right[4];
      b.load_b_of_rows(right, b_row + 16 * n, step);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma<T>(d[m][2 * n], left[m], right[0], right[1]);
        mma<T>(d[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// d += a b for the warp's rows of a, rounded to T, and kHalf rows of `b`.
template <class T, int D, int M>
__device__ __forceinline__ void multiply(float (&d)[M][D / 8][4], const float (&a)[M][kHalf / 8][4],
                                         const SharedTile<T, D>& b, int b_row) {
#pragma unroll
  for (int step = 0; step < kHalf / 16; ++step) {
    uint32_t left[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&from)[4] = a[m][2 * step + i / 2];
        left[m][i] = pack_two<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
      }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t right[4];
      b.load_b(right, b_row + 16 * step, n);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma<T>(d[m][2 * n], left[m], right[0], right[1]);
        mma<T>(d[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

template <class T, int D, int M>
__device__ __forceinline__ void store_rows(const float (&from)[M][D / 8][4], float factor,
                                           const AttentionRows& to, const Place& p,
                                           const Span& span, int own) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = p.first + own + 16 * m + 8 * half + p.group;
      if (row >= span.count) continue;
      T* at = row_of<T>(to, p, span, row) + p.pair;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<uint32_t*>(at + 8 * n) =
            pack_two<T>(from[m][n][2 * half] * factor, from[m][n][2 * half + 1] * factor);
    }
  }
}

// A block owns keys and goes through the queries; scores are transposed, [keys, queries].
template <class T, int D>
__global__ void __launch_bounds__(kBlock, 2)
    keys_kernel(DistanceAttentionArgs args, const float* delta) {
  extern __shared__ __align__(16) unsigned char raw[];
  auto& memory = *reinterpret_cast<KeyMemory<T, D>*>(raw);
  constexpr int kRows = kOwned<D>, kM = kBlocks<D>;
  const Place p = place<D>(args);
  if (p.first >= p.keys.count) return;
  const TileRange tiles = tiles_of_queries<D>(p);

  copy_rows<kRows, D>(memory.k, args.k, p, p.keys, p.first);
  copy_rows<kRows, D>(memory.v, args.v, p, p.keys, p.first);
  const int64_t statistics = (p.sample * args.heads + p.head) * args.queries;
  const auto fetch = [&](int tile) {
    const int first = tile * kTile;
    const int slot = tile % 2;
    copy_rows<kTile, D>(memory.q[slot], args.q, p, p.queries, first);
    copy_rows<kTile, D>(memory.dout[slot], args.dout, p, p.queries, first);
    for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kBlock) {
      const bool inside = first + i < p.queries.count;
      memory.lse[slot][i] = inside ? args.lse[statistics + first + i] * kLog2E : INFINITY;
      memory.delta[slot][i] = inside ? delta[statistics + first + i] : 0.0f;
    }
    // Distances from the first key and the tile's last query on.
    copy_biases(memory.biases[slot], args, p.head, p.first - first - (kTile - 1));
    end_copy_group();
  };
  if (tiles.begin < tiles.end) fetch(tiles.begin);

  const float scale = static_cast<float>(args.scale) * kLog2E;
  const int own = p.warp * 16 * kM;
  float dk[kM][D / 8][4] = {}, dv[kM][D / 8][4] = {};
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    wait_for_copies<0>();
    __syncthreads();
    if (tile + 1 < tiles.end) fetch(tile + 1);
    const int slot = tile % 2;
    const SharedTile<T, D> k(memory.k), v(memory.v), q(memory.q[slot]), dout(memory.dout[slot]);
    const int first = tile * kTile;
#pragma unroll 1
    for (int part = 0; part < kTile; part += kHalf) {
      // No query of the part sees a key of the warp.
      const int nearest = p.first + own, last = nearest + 16 * kM - 1;
      if (first + part + kHalf <= nearest - p.right || first + part > last + p.left) continue;
      float scores[kM][kHalf / 8][4] = {}, grads[kM][kHalf / 8][4] = {};
      multiply_rows<T, D, kM>(scores, k, own, q, part);
      const bool whole =
          last - p.right <= first + part && first + part + kHalf - 1 <= nearest + p.left;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kHalf / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int row = own + 16 * m + e / 2 * 8 + p.group,
                      column = part + 8 * n + p.pair + e % 2;
            float& score = scores[m][n][e];
            score = power_of_two(score * scale + memory.biases[slot][row - column + kTile - 1] -
                                 memory.lse[slot][column]);
            const int distance = p.first + row - first - column;
            if (!whole && (distance > p.right || distance < -p.left)) score = 0.0f;
          }
        }
      }
      multiply<T, D, kM>(dv, scores, dout, part);
      multiply_rows<T, D, kM>(grads, v, own, dout, part);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kHalf / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            grads[m][n][e] = scores[m][n][e] *
                             (grads[m][n][e] - memory.delta[slot][part + 8 * n + p.pair + e % 2]);
      multiply<T, D, kM>(dk, grads, q, part);
    }
  }
  store_rows<T, D, kM>(dk, static_cast<float>(args.scale), args.dk, p, p.keys, own);
  store_rows<T, D, kM>(dv, 1.0f, args.dv, p, p.keys, own);
}

// Sums along diagonals, by warps of queries: [b, n, warps, length]. Entry t of a warp whose first
// row is r is that of distance t - r - (16 M - 1).
template <int D>
int64_t warps_of(int64_t queries) {
  return (queries + kOwned<D> - 1) / kOwned<D> * kWarps;
}
__host__ __device__ inline int64_t diagonals_of(int64_t keys) {
  return (keys + kTile - 1) / kTile * kTile + kHalf;
}

template <class T, int D>
struct QueryMemory {
  T q[kOwned<D> * D], dout[kOwned<D> * D];
  T k[2][kTile * D], v[2][kTile * D];
  float biases[2][kOwned<D> + kTile];
  float diagonals[kWarps][8][kWindow];
};

// A block owns queries and goes through the keys.
template <class T, int D>
__global__ void __launch_bounds__(kBlock, 2)
    queries_kernel(DistanceAttentionArgs args, const float* delta, float* partial) {
  extern __shared__ __align__(16) unsigned char raw[];
  auto& memory = *reinterpret_cast<QueryMemory<T, D>*>(raw);
  constexpr int kRows = kOwned<D>, kM = kBlocks<D>, kOwn = 16 * kM;
  // Distances of kOwn x kHalf scores: -(kOwn - 1) ... kHalf - 1.
  constexpr int kGroups = kHalf / 8 + 2 * kM - 1;
  const Place p = place<D>(args);
  if (p.first >= p.queries.count) return;
  const TileRange tiles = tiles_of_keys<D>(p);

  copy_rows<kRows, D>(memory.q, args.q, p, p.queries, p.first);
  copy_rows<kRows, D>(memory.dout, args.dout, p, p.queries, p.first);
  fetch_keys<D>(memory, args, p, tiles.begin);

  const float scale = static_cast<float>(args.scale) * kLog2E;
  const int own = p.warp * kOwn;
  const int64_t statistics = (p.sample * args.heads + p.head) * args.queries;
  float lse[kM][2], deltas[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = p.first + own + 16 * m + 8 * half + p.group;
      const bool inside = row < p.queries.count;
      lse[m][half] = inside ? args.lse[statistics + row] * kLog2E : INFINITY;
      deltas[m][half] = inside ? delta[statistics + row] : 0.0f;
    }
  }
  const int64_t length = diagonals_of(args.keys);
  float* sums =
      partial +
      (((p.sample * args.heads + p.head) * gridDim.x + blockIdx.x) * kWarps + p.warp) * length;
  float carry = 0.0f;  // of the distance that a lane adds next
  float dq[kM][D / 8][4] = {};

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    wait_for_copies<0>();
    __syncthreads();
    if (tile + 1 < tiles.end) fetch_keys<D>(memory, args, p, tile + 1);
    const int slot = tile % 2;
    const SharedTile<T, D> q(memory.q), dout(memory.dout), k(memory.k[slot]), v(memory.v[slot]);
    const int first = tile * kTile;
#pragma unroll 1
    for (int part = 0; part < kTile; part += kHalf) {
      // No query of the warp sees a key of the part; without a bias, nothing is written for it.
      const int nearest = p.first + own, last = nearest + kOwn - 1;
      if (args.dbias == nullptr &&
          (first + part > last + p.right || first + part + kHalf <= nearest - p.left))
        continue;
      float scores[kM][kHalf / 8][4] = {}, grads[kM][kHalf / 8][4] = {};
      multiply_rows<T, D, kM>(scores, q, own, k, part);
      multiply_rows<T, D, kM>(grads, dout, own, v, part);
      const bool whole = first + part + kHalf <= p.keys.count &&
                         first + part + kHalf - 1 <= nearest + p.right &&
                         first + part >= last - p.left;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kHalf / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int row = own + 16 * m + e / 2 * 8 + p.group,
                      column = part + 8 * n + p.pair + e % 2;
            const float bias = memory.biases[slot][column - row + kRows - 1];
            float probability = power_of_two(scores[m][n][e] * scale + bias - lse[m][e / 2]);
            const int distance = first + column - p.first - row;
            if (!whole &&
                (first + column >= p.keys.count || distance > p.right || distance < -p.left))
              probability = 0.0f;
            grads[m][n][e] = probability * (grads[m][n][e] - deltas[m][e / 2]);
          }
        }
      }
      multiply<T, D, kM>(dq, grads, k, part);
      if (args.dbias == nullptr) continue;

      // Scores of one distance: of the blocks of 8 x 8 with one difference of their places first,
      // then of the rows of such a block.
      float of_group[kGroups][2] = {};
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kHalf / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            of_group[n - 2 * m - e / 2 + 2 * kM - 1][e % 2] += grads[m][n][e];
      __syncwarp();
      float* rows = memory.diagonals[p.warp][p.group];
#pragma unroll
      for (int u = 0; u < kGroups; ++u)
#pragma unroll
        for (int e = 0; e < 2; ++e) rows[8 * u + p.pair + e - p.group + 7] = of_group[u][e];
      __syncwarp();
      // Column c of row g: distance c - (kOwn - 1); written where 0 <= c + g - 7 < 8 kGroups.
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        const float* of_row = memory.diagonals[p.warp][g];
        if (p.lane + g >= 7 && p.lane + g - 7 < 8 * kGroups) low += of_row[p.lane];
        if (p.lane + kHalf + g - 7 < 8 * kGroups) high += of_row[p.lane + kHalf];
      }
      sums[first + part + p.lane] = low + carry;
      carry = high;
    }
  }
  if (args.dbias != nullptr) sums[tiles.end * kTile + p.lane] = carry;
  store_rows<T, D, kM>(dq, static_cast<float>(args.scale), args.dq, p, p.queries, own);
}

// Adds the sums of all samples and warps of a head to the gradient of its bias; 32 distances per
// block.
__global__ void __launch_bounds__(256)
    bias_kernel(DistanceAttentionArgs args, const float* partial, int warps, int owned) {
  __shared__ float shared[8][kWarpThreads];
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads,
            part = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int64_t head = blockIdx.y, entries = args.queries + args.keys - 1,
                entry = int64_t{blockIdx.x} * kWarpThreads + lane, length = diagonals_of(args.keys);
  const int64_t distance = entry - (args.queries - 1);
  float sum = 0.0f;
  for (int64_t i = part; i < args.samples * warps; i += 8) {
    const int64_t sample = i / warps, warp = i % warps, first = warp * owned,
                  at = distance + first + owned - 1;
    // What the warp wrote: up to the tile of the last key that its block sees.
    const int queries = span_of(args.query_offsets, sample, args.queries).count,
              keys = span_of(args.key_offsets, sample, args.keys).count,
              block_first = static_cast<int>(warp) / kWarps * kWarps * owned;
    if (block_first >= queries) continue;
    const int seen = args.causal ? min(keys, min(block_first + kWarps * owned, queries)) : keys;
    const int written = (seen + kTile - 1) / kTile * kTile + kHalf;
    if (at >= 0 && at < written)
      sum += partial[((sample * args.heads + head) * warps + warp) * length + at];
  }
  shared[part][lane] = sum;
  __syncthreads();
  if (part != 0 || entry >= entries) return;
  for (int other = 1; other < 8; ++other) sum += shared[other][lane];
  args.dbias[head * entries + entry] += sum;
}

template <class F>
void with_half_type(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16) return f(__nv_bfloat16{});
  MEGATRON_ASSERT(dtype == DType::kFloat16, "attention by distance of ", to_string(dtype));
  f(__half{});
}

template <class F>
void with_head_size(int64_t head_size, F&& f) {
  if (head_size == 64) return f(std::integral_constant<int, 64>{});
  MEGATRON_ASSERT(head_size == 128, "attention by distance of heads of ", head_size);
  f(std::integral_constant<int, 128>{});
}

template <class Memory, class Kernel, class... Extra>
void launch_over(Kernel* kernel, int64_t rows, int owned, const DistanceAttentionArgs& args,
                 cudaStream_t stream, Extra... extra) {
  MEGATRON_ASSERT(allow_shared_memory(kernel, sizeof(Memory)), "attention by distance needs ",
                  sizeof(Memory), " bytes of shared memory");
  const dim3 grid(static_cast<unsigned>((rows + owned - 1) / owned),
                  static_cast<unsigned>(args.heads), static_cast<unsigned>(args.samples));
  kernel<<<grid, kBlock, sizeof(Memory), stream>>>(args, extra...);
}

void check_args(const DistanceAttentionArgs& args) {
  MEGATRON_ASSERT(!args.causal || args.queries == args.keys, "causal attention by distance of ",
                  args.queries, " queries over ", args.keys, " keys");
  MEGATRON_ASSERT(args.queries > 0 && args.keys > 0, "attention over nothing");
  MEGATRON_ASSERT((args.window_left < 0 && args.window_right < 0) ||
                      (args.queries == args.keys && args.dbias == nullptr),
                  "a window beside a bias, or over other keys");
}

}  // namespace

void distance_attention_forward_cuda(const DistanceAttentionArgs& args, void* stream) {
  check_args(args);
  with_half_type(args.dtype, [&](auto type) {
    with_head_size(args.head_size, [&](auto size) {
      using T = decltype(type);
      constexpr int D = size();
      launch_over<ForwardMemory<T, D>>(forward_kernel<T, D>, args.queries, kOwned<D>, args,
                                       as_stream(stream));
    });
  });
  check_cuda(cudaGetLastError(), "attention by distance");
}

void distance_attention_backward_cuda(const DistanceAttentionArgs& args, void* stream) {
  check_args(args);
  const cudaStream_t s = as_stream(stream);
  float* delta = static_cast<float*>(args.workspace);
  float* partial = delta + args.samples * args.heads * args.queries;
  with_half_type(args.dtype, [&](auto type) {
    with_head_size(args.head_size, [&](auto size) {
      using T = decltype(type);
      constexpr int D = size();
      const int64_t rows = args.samples * args.heads * args.queries,
                    rows_per_block = kThreads / kWarpThreads;
      delta_kernel<T, D>
          <<<static_cast<unsigned>((rows + rows_per_block - 1) / rows_per_block), kThreads, 0, s>>>(
              args, delta);
      launch_over<KeyMemory<T, D>>(keys_kernel<T, D>, args.keys, kOwned<D>, args, s, delta);
      launch_over<QueryMemory<T, D>>(queries_kernel<T, D>, args.queries, kOwned<D>, args, s, delta,
                                     partial);
      if (args.dbias == nullptr) return;
      const dim3 grid(static_cast<unsigned>((args.queries + args.keys - 1 + 31) / 32),
                      static_cast<unsigned>(args.heads));
      bias_kernel<<<grid, 256, 0, s>>>(args, partial, static_cast<int>(warps_of<D>(args.queries)),
                                       16 * kBlocks<D>);
    });
  });
  check_cuda(cudaGetLastError(), "gradients of attention by distance");
}

}  // namespace megatron
