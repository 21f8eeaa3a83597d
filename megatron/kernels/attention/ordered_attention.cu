// Note [Sums in one order]
// A row's softmax is computed in steps of 32 positions with a running maximum, over splits of 256
// positions, whose results are added in rising order. Steps and splits lie at fixed positions, so
// that it does not matter whether one warp passes over all of them, as it does for the rows of a
// prompt or of training, or warps take splits in turn, as they do in decoding: each waits for its
// turn to add. What a row does not see adds exact zeros and leaves maxima alone, so that
// rows with other ends can share a tile, and steps that none of them sees can be left out. Products
// and sums that the compiler may contract in more than one way are written as what they are.
#include <algorithm>
#include <cmath>

#include "megatron/kernels/attention/ordered_attention.h"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/detail/mma_tiles.cuh"
#include "megatron/kernels/detail/paged_pool.h"

namespace megatron {
namespace {

constexpr int kStep = 32, kSplit = 256;
constexpr int kTileWarps = 8, kTileRows = 16 * kTileWarps, kTileKeys = 64, kTileStages = 3;
constexpr int kDecodeSlots = 3;  // of 32 keys or values
constexpr int kPiece = 16;       // positions of a copy, which lie in one block

// What a warp has seen for its 16 rows: of the values, which are not yet divided by `sum`, a thread
// has columns 8 i + 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8.
template <int D>
struct Rows {
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  float values[D / 8][4] = {};
};

// Positions [first, end) that those two rows see.
struct Sight {
  int first[2], end[2];
};

// Of 32 positions: a thread has columns 8 i + 2 (lane % 4) and the next of its two rows.
using Scores = float[4][4];

// Queries times 32 keys, rows from `row` on of the tile.
template <class T, int D>
__device__ __forceinline__ void multiply_keys(Scores& scores, const uint32_t (&q)[D / 16][4],
                                              const SharedTile<T, D>& keys, int row) {
#pragma unroll
  for (int i = 0; i < 16; ++i) scores[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[4];
      keys.load_b_of_rows(b, row + 16 * half, step);
      mma<T>(scores[2 * half], q[step], b[0], b[1]);
      mma<T>(scores[2 * half + 1], q[step], b[2], b[3]);
    }
  }
}

// Adds what the rows see of 32 positions from `position` on, whose values are rows from `row` on of
// the tile. Of `sum` a thread has its own share.
template <class T, int D>
__device__ __forceinline__ void take_step(Rows<D>& seen, Scores& scores,
                                          const SharedTile<T, D>& values, int row, int position,
                                          const Sight& sight, bool all_see, float scale,
                                          float cap) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  // In powers of two
  float factor = __fmul_rn(scale, kLog2E);
  if (cap > 0.0f) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& score = scores[i / 4][i % 4];
      score = __fmul_rn(cap, tanhf(__fdiv_rn(__fmul_rn(score, scale), cap)));
    }
    factor = kLog2E;
  }
  if (!all_see) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int at = position + i / 4 * 8 + lane % 4 * 2 + i % 2, half = i % 4 / 2;
      if (at < sight.first[half] || at >= sight.end[half]) scores[i / 4][i % 4] = -INFINITY;
    }
  }
  float kept[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = scores[0][2 * half];
#pragma unroll
    for (int i = 1; i < 8; ++i) most = fmaxf(most, scores[i / 2][2 * half + i % 2]);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    most = fmaxf(seen.most[half], __fmul_rn(most, factor));
    const float base = finite_base(most);
    kept[half] = power_of_two(__fsub_rn(seen.most[half], base));
    seen.most[half] = most;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& score = scores[i / 2][2 * half + i % 2];
      score = power_of_two(__fmaf_rn(score, factor, -base));
      sum = __fadd_rn(sum, score);
    }
    seen.sum[half] = __fmaf_rn(seen.sum[half], kept[half], sum);
  }
  // A factor of one changes nothing.
  if (__any_sync(~0u, kept[0] != 1.0f || kept[1] != 1.0f)) {
#pragma unroll
    for (int column = 0; column < D / 8; ++column)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        seen.values[column][i] = __fmul_rn(seen.values[column][i], kept[i / 2]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of the positions
    const uint32_t p[4] = {pack_two<T>(scores[2 * half][0], scores[2 * half][1]),
                           pack_two<T>(scores[2 * half][2], scores[2 * half][3]),
                           pack_two<T>(scores[2 * half + 1][0], scores[2 * half + 1][1]),
                           pack_two<T>(scores[2 * half + 1][2], scores[2 * half + 1][3])};
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t b[4];
      values.load_b(b, row + 16 * half, step);
      mma<T>(seen.values[2 * step], p, b[0], b[1]);
      mma<T>(seen.values[2 * step + 1], p, b[2], b[3]);
    }
  }
}

// The sums over the four threads of a row, after a split.
template <int D>
__device__ __forceinline__ void end_split(Rows<D>& seen) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& sum = seen.sum[half];
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  }
}

// The weights of two sums, of which the second comes later; `most` becomes that of both.
struct Weights {
  float before, later;
  __device__ __forceinline__ Weights(float& most, float later_most) {
    const float larger = fmaxf(most, later_most), base = finite_base(larger);
    before = power_of_two(__fsub_rn(most, base));
    later = power_of_two(__fsub_rn(later_most, base));
    most = larger;
  }
  __device__ __forceinline__ void add(float& value, float later_value) const {
    value = __fmaf_rn(value, before, __fmul_rn(later_value, later));
  }
};

// The sequence's positions in a pool.
struct Places {
  const int32_t* blocks;
  int size;
  bool one_block;  // for all of them

  // In elements, of a position; those up to the next multiple of 16 follow it.
  __device__ __forceinline__ int64_t of(const PagedPool& pool, int position) const {
    const int number = one_block ? 0 : position / size;
    return blocks[number] * pool.block_stride + (position - number * size) * pool.position_stride;
  }
};

// Starts copies of `Positions` positions of a group by `Threads` threads, where this one is
// `thread`. What lies outside [first, end), and features behind those of a head, become zeros.
template <class T, int D, int Positions, int Threads>
__device__ __forceinline__ void fetch(void* to, const PagedPool& pool, const Places& places,
                                      int64_t size, int64_t group, int position, int first, int end,
                                      int thread) {
  constexpr int kChunks = D / 8, kRows = Threads / kChunks;  // of one copy of all threads
  static_assert(Threads % kChunks == 0 && Positions % kRows == 0 && Positions % kPiece == 0);
  const SharedTile<T, D> tile(to);
  const int column = thread % kChunks, row = thread / kChunks;
  const auto* data = static_cast<const T*>(pool.data) + group * pool.group_stride + column * 8;
  // Of tiles within one block the place is looked up once.
  const bool together = places.one_block || places.size % Positions == 0;
  int64_t place = together ? places.of(pool, position) : 0;
  // Where one warp fetches, its instructions take the time: all of it without bounds.
  if constexpr (Threads == kWarpThreads) {
    if (together && position >= first && position + Positions <= end && size == D) {
      const T* from = data + place + row * pool.position_stride;
#pragma unroll
      for (int i = 0; i < Positions / kRows; ++i) {
        copy_async_or_zero(tile.chunk(row + i * kRows, column), from, true);
        from += kRows * pool.position_stride;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < Positions / kRows; ++i) {
    const int at = row + i * kRows, in_piece = together ? at : at % kPiece;
    if (!together && position + at < end) place = places.of(pool, position + at - in_piece);
    const bool inside = position + at >= first && position + at < end && column * 8 < size;
    copy_async_or_zero(tile.chunk(at, column),
                       inside ? data + place + in_piece * pool.position_stride : data, inside);
  }
}

// Rows of a tile are heads of a group, row after row of the sequence.
struct Tile {
  int64_t sequence, group;
  int64_t query, out;  // places of the group's first head in the first row
  int rows, position;  // of the sequence, and where the first lies
  int heads;           // of a row in this tile
  int64_t head;        // the first of them in its group
  int64_t row;         // the first, in its sequence
};

__device__ __forceinline__ Sight sight_of(const OrderedAttention& a, const Tile& tile, int row) {
  Sight sight;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_sequence = (row + 8 * half) / tile.heads;
    const int position = tile.position + of_sequence;
    const bool there = of_sequence < tile.rows;
    sight.end[half] = there ? position + 1 : 0;
    sight.first[half] = a.window_left < 0 ? 0 : max(0, position - static_cast<int>(a.window_left));
  }
  return sight;
}

// Fragments of 16 rows from `row` on; what is not there is zero.
template <class T, int D>
__device__ __forceinline__ void load_queries(uint32_t (&q)[D / 16][4], const OrderedAttention& a,
                                             const Tile& tile, int row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const T* from[2];
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + lane / 4 + 8 * half, of_sequence = own / tile.heads;
    there[half] = of_sequence < tile.rows;
    from[half] = static_cast<const T*>(a.query) + tile.query + of_sequence * a.query_row +
                 own % tile.heads * a.query_head;
  }
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int feature = 16 * step + lane % 4 * 2 + i / 2 * 8;
      q[step][i] = there[i % 2] && feature < a.size
                       ? *reinterpret_cast<const uint32_t*>(from[i % 2] + feature)
                       : 0u;
    }
  }
}

// Divides and writes 16 rows from `row` on.
template <class T, int D>
__device__ __forceinline__ void finish(const Rows<D>& total, const OrderedAttention& a,
                                       const Tile& tile, int row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + lane / 4 + 8 * half, of_sequence = own / tile.heads,
              head = own % tile.heads;
    if (of_sequence >= tile.rows) continue;
    const int64_t of_group = a.heads / a.groups;
    const int64_t of_all = tile.group * of_group + tile.head + head;
    const bool sees = total.sum[half] != 0.0f;  // what is not a number stays so
    if (a.lse != nullptr && lane % 4 == 0) {
      constexpr float kLn2 = 0.69314718055994531f;
      a.lse[(tile.sequence * a.heads + of_all) * a.count + tile.row + of_sequence] =
          sees ? (total.most[half] + log2f(total.sum[half])) * kLn2 : -INFINITY;
    }
    T* out = static_cast<T*>(a.out) + tile.out + of_sequence * a.out_row + head * a.out_head;
#pragma unroll
    for (int column = 0; column < D / 8; ++column) {
      const int feature = column * 8 + lane % 4 * 2;
      if (feature >= a.size) continue;
      const auto value = [&](int i) {
        return sees ? __fdiv_rn(total.values[column][2 * half + i], total.sum[half]) : 0.0f;
      };
      *reinterpret_cast<uint32_t*>(out + feature) = pack_two<T>(value(0), value(1));
    }
  }
}

template <class T, int D>
struct TileMemory {
  T keys[kTileStages][kTileKeys * D], values[kTileStages][kTileKeys * D];
  float totals[kTileWarps][D / 2 + 4][kWarpThreads];  // the sum of the splits before, by thread
};

template <int D>
__device__ __forceinline__ void load_stored(Rows<D>& rows, const float (*stored)[kWarpThreads]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.most[half] = stored[half][lane];
    rows.sum[half] = stored[2 + half][lane];
  }
#pragma unroll
  for (int i = 0; i < D / 2; ++i) rows.values[i / 4][i % 4] = stored[4 + i][lane];
}

// stored += split, which begins anew, without another copy of the sum in registers.
template <int D>
__device__ __forceinline__ void add_to_stored(Rows<D>& split, float (*stored)[kWarpThreads],
                                              bool is_first) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = is_first ? -INFINITY : stored[half][lane],
          sum = is_first ? 0.0f : stored[2 + half][lane];
    const Weights weights(most, split.most[half]);
    weights.add(sum, split.sum[half]);
    stored[half][lane] = most;
    stored[2 + half][lane] = sum;
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const int column = i / 2, at = 2 * half + i % 2;
      float value = is_first ? 0.0f : stored[4 + 4 * column + at][lane];
      weights.add(value, split.values[column][at]);
      stored[4 + 4 * column + at][lane] = value;
    }
  }
  split = {};
}

// A block has up to 128 rows of a group: warps share the keys and values.
template <class T, int D>
__global__ void __launch_bounds__(kTileWarps* kWarpThreads, 1)
    ordered_tiles_kernel(OrderedAttention a) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& memory = *reinterpret_cast<TileMemory<T, D>*>(raw);
  const int of_group = static_cast<int>(a.heads / a.groups), most_rows = kTileRows / of_group;
  Tile tile;
  tile.group = blockIdx.y;
  tile.heads = of_group;
  tile.head = 0;
  int64_t first_row;
  if (a.spans != nullptr) {
    const int32_t* span = a.spans + 4 * int64_t{blockIdx.x};
    tile.sequence = span[0];
    first_row = span[1];
    tile.rows = span[2];
    tile.position = span[3];
    tile.row = 0;
    tile.query = first_row * a.query_row;
    tile.out = first_row * a.out_row;
  } else {
    // Those that see most begin first.
    const int64_t tiles = (a.count + most_rows - 1) / most_rows;
    tile.sequence = blockIdx.x % a.sequences;
    tile.row = first_row = (tiles - 1 - blockIdx.x / a.sequences) * most_rows;
    tile.rows = static_cast<int>(min(int64_t{most_rows}, a.count - first_row));
    tile.position = static_cast<int>(a.start + first_row);
    tile.query = tile.sequence * a.query_part + first_row * a.query_row;
    tile.out = tile.sequence * a.out_part + first_row * a.out_row;
  }
  tile.query += tile.group * of_group * a.query_head;
  tile.out += tile.group * of_group * a.out_head;
  const int end = tile.position + tile.rows;
  const int first = a.window_left < 0 ? 0 : max(0, tile.position - static_cast<int>(a.window_left));
  const int begin = first / kTileKeys * kTileKeys;
  const Places places{a.block_table + tile.sequence * a.table_stride,
                      static_cast<int>(a.block_size), a.table_stride == 1};
  const auto start = [&](int position, int stage) {
    if (position < end) {
      const int thread = static_cast<int>(threadIdx.x);
      fetch<T, D, kTileKeys, kTileWarps * kWarpThreads>(memory.keys[stage], a.keys, places, a.size,
                                                        tile.group, position, first, end, thread);
      fetch<T, D, kTileKeys, kTileWarps * kWarpThreads>(
          memory.values[stage], a.values, places, a.size, tile.group, position, first, end, thread);
    }
    end_copy_group();
  };
#pragma unroll
  for (int i = 0; i < kTileStages - 1; ++i) start(begin + i * kTileKeys, i);

  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads,
            lane = static_cast<int>(threadIdx.x) % kWarpThreads, row = 16 * warp;
  uint32_t q[D / 16][4];
  load_queries<T, D>(q, a, tile, row);
  const Sight sight = sight_of(a, tile, row + lane / 4);
  // Of the warp's rows: positions that all of them see, and that any of them sees
  const int last_row = min(row + 15, tile.rows * tile.heads - 1);
  const int own_end = last_row < row ? 0 : tile.position + last_row / tile.heads + 1;
  const int own_first =
      a.window_left < 0
          ? 0
          : max(0, tile.position + row / tile.heads - static_cast<int>(a.window_left));
  const int all_end = row + 15 < tile.rows * tile.heads ? tile.position + row / tile.heads + 1 : 0;
  const int all_first =
      a.window_left < 0
          ? 0
          : max(0, tile.position + last_row / tile.heads - static_cast<int>(a.window_left));
  const float scale = static_cast<float>(a.scale), cap = static_cast<float>(a.softcap);
  Rows<D> split;
  bool is_first = true;
  const auto add = [&] {
    end_split(split);
    add_to_stored(split, memory.totals[warp], is_first);
    is_first = false;
  };
  int stage = 0, ahead = kTileStages - 1;
  for (int position = begin; position < end; position += kTileKeys) {
    wait_for_copies<kTileStages - 2>();
    __syncthreads();
    start(position + (kTileStages - 1) * kTileKeys, ahead);
    ahead = ahead + 1 == kTileStages ? 0 : ahead + 1;
    const SharedTile<T, D> keys(memory.keys[stage]), values(memory.values[stage]);
    stage = stage + 1 == kTileStages ? 0 : stage + 1;
    // Products of all keys first: those of values then overlap with the next softmax.
    if (position < own_end && position + kTileKeys > own_first) {
      constexpr int kParts = kTileKeys / kStep;
      Scores scores[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        multiply_keys<T, D>(scores[part], q, keys, part * kStep);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int at = position + part * kStep;
        take_step<T, D>(split, scores[part], values, part * kStep, at, sight,
                        at >= all_first && at + kStep <= all_end, scale, cap);
      }
    }
    if ((position + kTileKeys) % kSplit == 0) add();
  }
  wait_for_copies<0>();
  if (is_first || end % kSplit != 0) add();
  load_stored(split, memory.totals[warp]);
  finish<T, D>(split, a, tile, row);
}

template <class T, int D, int Warps>
struct DecodeMemory {
  T slots[Warps][kDecodeSlots][kStep * D];
  // The sum of the splits before `turn`, as the threads of a warp have it
  float total[D / 2 + 4][kWarpThreads];
  int turn;
};

// The steps of a warp: those of every Warps-th split.
template <int Warps>
struct Walk {
  int position;
  __device__ __forceinline__ bool ends_split() const { return (position + kStep) % kSplit == 0; }
  __device__ __forceinline__ void advance() {
    position += kStep + (ends_split() ? (Warps - 1) * kSplit : 0);
  }
};

// A block has up to 16 heads of the group of one row, its warps take splits in turn.
template <class T, int D, int Warps>
__global__ void __launch_bounds__(Warps* kWarpThreads) ordered_decode_kernel(OrderedAttention a) {
  let_next_kernel_begin();
  extern __shared__ __align__(128) unsigned char raw[];
  auto& memory = *reinterpret_cast<DecodeMemory<T, D, Warps>*>(raw);
  const int64_t of_group = a.heads / a.groups, tiles = (of_group + 15) / 16;
  Tile tile;
  tile.sequence = blockIdx.x;
  tile.row = 0;
  tile.group = blockIdx.y / tiles;
  tile.head = blockIdx.y % tiles * 16;
  tile.heads = static_cast<int>(min(int64_t{16}, of_group - tile.head));
  const int end = a.lengths[tile.sequence];
  tile.rows = 1;
  tile.position = end - 1;
  const int64_t first_head = tile.group * of_group + tile.head;
  tile.query = tile.sequence * a.query_part + first_head * a.query_head;
  tile.out = tile.sequence * a.out_part + first_head * a.out_head;
  const int first = a.window_left < 0 ? 0 : max(0, end - 1 - static_cast<int>(a.window_left));
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads,
            lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int first_split = first / kSplit, last_split = max(first_split, (end - 1) / kSplit);
  if (threadIdx.x == 0) memory.turn = first_split;
  __syncthreads();

  const Places places{a.block_table + tile.sequence * a.table_stride,
                      static_cast<int>(a.block_size), a.table_stride == 1};
  // Three slots: keys of a step, its values, and what comes next into the one that is free.
  int keys = 0, values = 1, free = 2;
  const auto start = [&](const PagedPool& pool, int position, int slot) {
    if (position < end)
      fetch<T, D, kStep, kWarpThreads>(memory.slots[warp][slot], pool, places, a.size, tile.group,
                                       position, first, end, lane);
    end_copy_group();
  };
  // The first split may begin behind its border.
  Walk<Warps> walk{warp == 0 ? first / kStep * kStep : (first_split + warp) * kSplit};
  start(a.keys, walk.position, keys);
  start(a.values, walk.position, values);
  uint32_t q[D / 16][4];
  load_queries<T, D>(q, a, tile, 0);
  const Sight sight = sight_of(a, tile, lane / 4);
  const float scale = static_cast<float>(a.scale), cap = static_cast<float>(a.softcap);
  Rows<D> split;
  // Adds split `number` to those before it.
  const auto add = [&](int number) {
    end_split(split);
    while (*static_cast<volatile int*>(&memory.turn) != number) __nanosleep(20);
    __threadfence_block();
    __syncwarp();
    add_to_stored(split, memory.total, number == first_split);
    __threadfence_block();
    __syncwarp();
    if (lane == 0) *static_cast<volatile int*>(&memory.turn) = number + 1;
  };
  int number = first_split + warp;
  while (walk.position < end) {
    const int position = walk.position;
    const bool ends_split = walk.ends_split() || position + kStep >= end;
    walk.advance();
    wait_for_copies<1>();
    __syncwarp();
    start(a.keys, walk.position, free);
    Scores scores;
    multiply_keys<T, D>(scores, q, SharedTile<T, D>(memory.slots[warp][keys]), 0);
    __syncwarp();
    start(a.values, walk.position, keys);
    wait_for_copies<2>();
    __syncwarp();
    take_step<T, D>(split, scores, SharedTile<T, D>(memory.slots[warp][values]), 0, position, sight,
                    position >= first && position + kStep <= end, scale, cap);
    __syncwarp();
    const int was_free = free;
    free = values;
    values = keys;
    keys = was_free;
    if (ends_split) {
      add(number);
      number += Warps;
    }
  }
  wait_for_copies<0>();
  if (warp != (last_split - first_split) % Warps) return;
  if (end > 0) load_stored(split, memory.total);
  finish<T, D>(split, a, tile, 0);
}

template <class T, int D, int Warps>
void start_decode(const OrderedAttention& args, unsigned tiles, cudaStream_t stream) {
  const auto kernel = ordered_decode_kernel<T, D, Warps>;
  constexpr size_t kBytes = sizeof(DecodeMemory<T, D, Warps>);
  MEGATRON_ASSERT(allow_shared_memory(kernel, kBytes), "no shared memory for attention");
  kernel<<<dim3(static_cast<unsigned>(args.sequences), tiles), Warps * kWarpThreads, kBytes,
           stream>>>(args);
}

template <class T, int D>
void start(const OrderedAttention& args, cudaStream_t stream) {
  if (args.lengths != nullptr) {
    const int64_t tiles = args.groups * ((args.heads / args.groups + 15) / 16);
    // The fewer blocks, the more warps of each, so that memory is busy.
    const auto count = static_cast<unsigned>(tiles);
    constexpr int64_t kProcessors = 132;
    if (args.sequences * tiles <= kProcessors)
      start_decode<T, D, 8>(args, count, stream);
    else if (args.sequences * tiles <= 2 * kProcessors)
      start_decode<T, D, 4>(args, count, stream);
    else
      start_decode<T, D, 2>(args, count, stream);
    return;
  }
  const auto kernel = ordered_tiles_kernel<T, D>;
  constexpr size_t kBytes = sizeof(TileMemory<T, D>);
  MEGATRON_ASSERT(allow_shared_memory(kernel, kBytes), "no shared memory for attention");
  const int64_t rows = ordered_span_rows(args.heads, args.groups);
  const int64_t tiles =
      args.spans != nullptr ? args.num_spans : args.sequences * ((args.count + rows - 1) / rows);
  kernel<<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(args.groups)),
           kTileWarps * kWarpThreads, kBytes, stream>>>(args);
}

}  // namespace

int64_t ordered_span_rows(int64_t heads, int64_t groups) { return kTileRows / (heads / groups); }

bool has_ordered_attention(const OrderedAttention& a) {
  return is_hopper() && (a.dtype == DType::kBFloat16 || a.dtype == DType::kFloat16) &&
         a.size <= 128 && a.size % 8 == 0 && a.heads / a.groups <= kTileRows &&
         (a.block_size % kPiece == 0 || a.table_stride == 1) && a.keys.scale == nullptr &&
         a.values.scale == nullptr && has_aligned_heads(a.keys) && has_aligned_heads(a.values) &&
         reinterpret_cast<uintptr_t>(a.query) % 4 == 0 && a.query_part % 2 == 0 &&
         a.query_row % 2 == 0 && a.query_head % 2 == 0;
}

void ordered_attention_cuda(const OrderedAttention& args, void* stream) {
  const auto with_type = [&](auto type) {
    using T = decltype(type);
    if (args.size <= 64)
      start<T, 64>(args, as_stream(stream));
    else
      start<T, 128>(args, as_stream(stream));
  };
  if (args.dtype == DType::kBFloat16)
    with_type(__nv_bfloat16{});
  else
    with_type(__half{});
  check_cuda(cudaGetLastError(), "ordered attention");
}

}  // namespace megatron
