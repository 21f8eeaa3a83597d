#include <cub/block/block_scan.cuh>

#include "megatron/kernels/detail/fp8_expert_tiles.cuh"

namespace megatron {
namespace {

constexpr int kPlanThreads = 512;

ExpertPlan plan_in(void* workspace, int64_t experts, int64_t rows) {
  char* at = static_cast<char*>(workspace);
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += static_cast<int64_t>(sizeof(*pointer)) * count;
  };
  ExpertPlan plan;
  take(plan.tiles, most_tiles(experts, rows));
  take(plan.padded_before, experts + 1);
  take(plan.tiles_before, experts + 1);
  take(plan.firsts, experts + 1);
  take(plan.amax, experts);
  return plan;
}

__device__ __forceinline__ int64_t count_of(const Fp8ExpertCast& args, int64_t expert) {
  if (args.counts == nullptr) return args.rows / args.experts;
  return args.wide_counts ? static_cast<const int64_t*>(args.counts)[expert]
                          : static_cast<const int32_t*>(args.counts)[expert];
}

struct Prefix {
  int64_t rows, padded, tiles;
  __device__ __forceinline__ Prefix operator+(const Prefix& other) const {
    return {rows + other.rows, padded + other.padded, tiles + other.tiles};
  }
};

// Which rows every tile has, by one thread block: sums over the experts before, then a search for
// the expert of each tile.
__global__ void __launch_bounds__(kPlanThreads)
    plan_tiles(Fp8ExpertCast args, ExpertPlan plan, int num_tiles) {
  using Scan = cub::BlockScan<Prefix, kPlanThreads>;
  __shared__ typename Scan::TempStorage storage;
  const int64_t unit = args.blocks ? kFp8Block : 16;
  Prefix before{0, 0, 0};
  for (int64_t base = 0; base < args.experts; base += kPlanThreads) {
    const int64_t expert = base + threadIdx.x;
    const int64_t given = expert < args.experts ? count_of(args, expert) : 0;
    const int64_t count = given > 0 ? given : 0;
    Prefix sum, total;
    Scan(storage).ExclusiveScan(
        Prefix{count, (count + unit - 1) / unit * unit, (count + kTileRows - 1) / kTileRows}, sum,
        Prefix{0, 0, 0}, [](const Prefix& a, const Prefix& b) { return a + b; }, total);
    __syncthreads();
    sum = before + sum;
    before = before + total;
    if (expert >= args.experts) continue;
    plan.firsts[expert] = static_cast<int>(sum.rows);
    plan.padded_before[expert] = sum.padded;
    plan.tiles_before[expert] = static_cast<int>(sum.tiles);
    plan.amax[expert] = 0.0f;
  }
  if (threadIdx.x == 0) {
    plan.firsts[args.experts] = static_cast<int>(before.rows);
    plan.tiles_before[args.experts] = static_cast<int>(before.tiles);
  }
  __syncthreads();
  for (int tile = static_cast<int>(threadIdx.x); tile < num_tiles; tile += kPlanThreads) {
    ExpertRowTile out{-1, 0, 0, 0, 0};
    if (tile < plan.tiles_before[args.experts]) {
      int low = 0, high = static_cast<int>(args.experts);  // the last expert not behind the tile
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (plan.tiles_before[middle] <= tile ? low : high) = middle;
      }
      const int first = plan.firsts[low], count = plan.firsts[low + 1] - first;
      // Never beyond the last row, whatever the counts say.
      if (first + int64_t{count} <= args.rows)
        out = {low, first, count, tile - plan.tiles_before[low], plan.padded_before[low]};
    }
    plan.tiles[tile] = out;
  }
}

// This thread's 4 rows of 8 columns, zeros behind the expert's last row.
template <class T>
__device__ __forceinline__ void load_rows(const Fp8ExpertCast& args, const ExpertRowTile& tile,
                                          int64_t row, int64_t column, BlockValues<T>& in) {
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
    if (row + r < tile.count && column < args.columns)
      in[r].load(static_cast<const T*>(args.x) + (tile.first + row + r) * args.columns + column);
}

template <class T>
__device__ __forceinline__ float amax_of_rows(const BlockValues<T>& in) {
  float amax = 0.0f;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x[kThreadColumns];
    in[r].get(x);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) amax = larger(amax, x[c]);
  }
  return amax;
}

// Of the rows whose scale is not given, or with `all` of all.
template <class T>
__global__ void __launch_bounds__(256) amax_kernel(Fp8ExpertCast args, const ExpertRowTile* tiles,
                                                   float* to, int64_t stride, bool all) {
  __shared__ float shared[33];
  const ExpertRowTile tile = tiles[blockIdx.y];
  if (tile.expert < 0 || (!all && given_scale(args, tile.expert) != 0.0f)) return;
  const TilePlace at = place_in_expert(tile, args.columns);
  BlockValues<T> in = {};
  load_rows<T>(args, tile, at.row, at.column, in);
  raise_amax(to + tile.expert * stride, amax_of_rows<T>(in), shared);
}

// The same from the largest magnitudes of the rows; a block takes a tile.
__global__ void __launch_bounds__(kTileRows)
    amax_of_tiles_kernel(Fp8ExpertCast args, const ExpertRowTile* tiles, float* to) {
  __shared__ float shared[33];
  const ExpertRowTile tile = tiles[blockIdx.x];
  if (tile.expert < 0 || given_scale(args, tile.expert) != 0.0f) return;
  const int row = tile.tile * kTileRows + static_cast<int>(threadIdx.x);
  raise_amax(to + tile.expert, row < tile.count ? args.row_amax[tile.first + row] : 0.0f, shared);
}

template <class T, Fp8Type Type>
__global__ void __launch_bounds__(256)
    expert_cast_kernel(Fp8ExpertCast args, const ExpertRowTile* tiles, const float* amax) {
  __shared__ __align__(16) uint32_t turned[kTileWords];
  __shared__ float shared[33];
  const ExpertRowTile tile = tiles[blockIdx.y];
  if (tile.expert < 0) return;
  const TilePlace at = place_in_expert(tile, args.columns);
  BlockValues<T> in = {};
  load_rows<T>(args, tile, at.row, at.column, in);
  const float scale = expert_scale(args, tile, amax, largest_of(Type));
  TileCodes codes;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x[kThreadColumns];
    in[r].get(x);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) x[c] *= scale;
    codes.left[r] = codes_of<Type>(x[0], x[1], x[2], x[3]);
    codes.right[r] = codes_of<Type>(x[4], x[5], x[6], x[7]);
  }
  if (args.in_rows != nullptr && at.column < args.columns)
    store_expert_rows(codes, at, args, tile, at.column);
  if (args.new_amax != nullptr)
    raise_amax(args.new_amax + tile.expert * args.amax_stride, amax_of_rows<T>(in), shared);
  if (args.in_columns == nullptr) return;
  turn_codes(codes, at, turned);
  __syncthreads();
  store_columns(turned, at, args.in_columns + args.columns * tile.padded_before, padded_rows(tile),
                args.columns);
}

// One thread block per 128 x 128 elements; store_block() writes into the expert's own matrices.
template <class T, Fp8Type Type>
__global__ void __launch_bounds__(kBlockThreads, 2)
    expert_block_cast_kernel(Fp8ExpertCast args, const ExpertRowTile* tiles) {
  __shared__ BlockMemory memory;
  const ExpertRowTile tile = tiles[blockIdx.y];
  if (tile.expert < 0) return;
  const int64_t blocks = args.columns / kFp8Block;
  const BlockPlace at(tile.tile * blocks + blockIdx.x, args.columns);
  BlockValues<T> in = {};
  load_rows<T>(args, tile, at.row(), at.column(), in);
  const Fp8BlockCast out = blocks_of_expert(args, tile);
  store_block<T, Type, /*kRagged=*/true>(in, at, out, at.block_column, memory, tile.count);
}

dim3 grid_of(const Fp8ExpertCast& args, int64_t num_tiles) {
  const int64_t width = args.blocks ? kFp8Block : kTileColumns;
  return dim3(static_cast<unsigned>((args.columns + width - 1) / width),
              static_cast<unsigned>(num_tiles));
}

void launch_amax(const Fp8ExpertCast& args, const ExpertPlan& plan, const dim3& grid, float* to,
                 int64_t stride, bool all, void* stream) {
  with_cast_type(args.dtype, [&](auto x) {
    amax_kernel<decltype(x)>
        <<<grid, 256, 0, as_stream(stream)>>>(args, plan.tiles, to, stride, all);
  });
  check_cuda(cudaGetLastError(), "largest values of experts");
}

}  // namespace

ExpertPlan plan_expert_tiles(const Fp8ExpertCast& args, int64_t num_tiles, void* stream) {
  MEGATRON_ASSERT(args.columns % (args.blocks ? kFp8Block : 16) == 0 &&
                      is_aligned({args.x, args.in_rows, args.in_columns}),
                  "FP8 cast of rows of experts with ", args.columns,
                  " columns: expected a multiple of ", args.blocks ? kFp8Block : 16,
                  ", 16-byte aligned");
  const ExpertPlan plan = plan_in(args.workspace, args.experts, args.rows);
  plan_tiles<<<1, kPlanThreads, 0, as_stream(stream)>>>(args, plan, static_cast<int>(num_tiles));
  check_cuda(cudaGetLastError(), "plan of an FP8 cast of experts");
  return plan;
}

int64_t fp8_expert_workspace(int64_t experts, int64_t rows) {
  return most_tiles(experts, rows) * static_cast<int64_t>(sizeof(ExpertRowTile)) +
         (experts + 1) * 24;
}

void fp8_expert_cast_cuda(const Fp8ExpertCast& args, void* stream) {
  const int64_t num_tiles = most_tiles(args.experts, args.rows);
  if (args.rows == 0 || args.columns == 0) return;
  const ExpertPlan plan = plan_expert_tiles(args, num_tiles, stream);
  const dim3 grid = grid_of(args, num_tiles);
  if (!args.blocks && args.row_amax != nullptr) {
    amax_of_tiles_kernel<<<static_cast<unsigned>(num_tiles), kTileRows, 0, as_stream(stream)>>>(
        args, plan.tiles, plan.amax);
  } else if (!args.blocks) {
    launch_amax(args, plan, grid, plan.amax, 1, /*all=*/false, stream);
  }
  with_cast_type(args.dtype, [&](auto x) {
    with_fp8_type(args.type, [&](auto type) {
      using T = decltype(x);
      if (args.blocks)
        expert_block_cast_kernel<T, type()>
            <<<grid, kBlockThreads, 0, as_stream(stream)>>>(args, plan.tiles);
      else
        expert_cast_kernel<T, type()>
            <<<grid, 256, 0, as_stream(stream)>>>(args, plan.tiles, plan.amax);
    });
  });
  check_cuda(cudaGetLastError(), "FP8 cast of experts");
}

void fp8_expert_amax_cuda(const Fp8ExpertCast& args, void* stream) {
  const int64_t num_tiles = most_tiles(args.experts, args.rows);
  if (args.rows == 0 || args.columns == 0) return;
  const ExpertPlan plan = plan_expert_tiles(args, num_tiles, stream);
  launch_amax(args, plan, grid_of(args, num_tiles), args.new_amax, args.amax_stride, /*all=*/true,
              stream);
}

}  // namespace megatron
