#include "megatron/kernels/detail/fp8_expert_tiles.cuh"
#include "megatron/kernels/detail/weighted_activation_math.h"
#include "megatron/kernels/fp8/fp8_expert_activation.h"

namespace megatron {
namespace {

// This thread's 4 rows of 8 columns of y, rounded to T; zeros behind the expert's last row.
template <class T, class Gate>
__device__ __forceinline__ void compute_tile(const Fp8ExpertActivation& args,
                                             const ExpertRowTile& tile, int64_t row, int64_t column,
                                             BlockValues<T>& y) {
  const WeightedActivationArgs& act = args.activation;
  const int64_t f = act.features;
  const T* x = static_cast<const T*>(act.x);
  BlockValues<T> ups = {};
  float weights[kThreadRows];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    y[r] = {};
    weights[r] = 0.0f;
    if (row + r >= tile.count || column >= f) continue;
    const int64_t at = tile.first + row + r;
    y[r].load(x + at * 2 * f + column);
    ups[r].load(x + at * 2 * f + f + column);
    weights[r] = static_cast<const float*>(act.weights)[at];
  }
  const float offset = static_cast<float>(act.offset), limit = static_cast<float>(act.limit);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float a[kThreadColumns], b[kThreadColumns];
    y[r].get(a);
    ups[r].get(b);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c)
      a[c] = Gate::at(at_most(a[c], limit)).act * (within(b[c], limit) + offset) * weights[r];
    y[r].set(a);
  }
}

template <class T>
__device__ __forceinline__ float amax_of(const BlockValues<T>& values) {
  float amax = 0.0f;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x[kThreadColumns];
    values[r].get(x);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) amax = larger(amax, x[c]);
  }
  return amax;
}

// The largest values of experts whose scale is not given.
template <class T, class Gate>
__global__ void __launch_bounds__(256)
    activation_amax_kernel(Fp8ExpertActivation args, const ExpertRowTile* tiles, float* amax) {
  __shared__ float shared[33];
  const ExpertRowTile tile = tiles[blockIdx.y];
  if (tile.expert < 0 || given_scale(args.cast, tile.expert) != 0.0f) return;
  const TilePlace at = place_in_expert(tile, args.activation.features);
  BlockValues<T> y;
  compute_tile<T, Gate>(args, tile, at.row, at.column, y);
  raise_amax(amax + tile.expert, amax_of<T>(y), shared);
}

template <class T, class Gate, Fp8Type Type>
__global__ void __launch_bounds__(256)
    expert_activation_kernel(Fp8ExpertActivation args, const ExpertRowTile* tiles,
                             const float* amax) {
  __shared__ __align__(16) uint32_t turned[kTileWords];
  __shared__ float shared[33];
  const ExpertRowTile tile = tiles[blockIdx.y];
  if (tile.expert < 0) return;
  const int64_t f = args.activation.features;
  const TilePlace at = place_in_expert(tile, f);
  BlockValues<T> y;
  compute_tile<T, Gate>(args, tile, at.row, at.column, y);
  const float scale = expert_scale(args.cast, tile, amax, largest_of(Type));
  TileCodes codes;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x[kThreadColumns];
    y[r].get(x);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) x[c] *= scale;
    codes.left[r] = codes_of<Type>(x[0], x[1], x[2], x[3]);
    codes.right[r] = codes_of<Type>(x[4], x[5], x[6], x[7]);
  }
  if (args.cast.in_rows != nullptr && at.column < f)
    store_expert_rows(codes, at, args.cast, tile, at.column);
  if (args.cast.new_amax != nullptr)
    raise_amax(args.cast.new_amax + tile.expert * args.cast.amax_stride, amax_of<T>(y), shared);
  if (args.cast.in_columns == nullptr) return;
  turn_codes(codes, at, turned);
  __syncthreads();
  store_columns(turned, at, args.cast.in_columns + f * tile.padded_before, padded_rows(tile), f);
}

// One thread block per 128 x 128 of the result.
template <class T, class Gate, Fp8Type Type>
__global__ void __launch_bounds__(kBlockThreads, 1)
    expert_block_activation_kernel(Fp8ExpertActivation args, const ExpertRowTile* tiles) {
  __shared__ BlockMemory memory;
  const ExpertRowTile tile = tiles[blockIdx.y];
  if (tile.expert < 0) return;
  const int64_t f = args.activation.features;
  const BlockPlace at(tile.tile * (f / kFp8Block) + blockIdx.x, f);
  BlockValues<T> y;
  compute_tile<T, Gate>(args, tile, at.row(), at.column(), y);
  store_block<T, Type, /*kRagged=*/true>(y, at, blocks_of_expert(args.cast, tile), at.block_column,
                                         memory, tile.count);
}

template <class T, class Gate>
void launch_activation(const Fp8ExpertActivation& args, cudaStream_t stream) {
  const int64_t num_tiles = most_tiles(args.cast.experts, args.cast.rows),
                width = args.cast.blocks ? kFp8Block : kTileColumns;
  const ExpertPlan plan = plan_expert_tiles(args.cast, num_tiles, stream);
  const dim3 grid(static_cast<unsigned>((args.activation.features + width - 1) / width),
                  static_cast<unsigned>(num_tiles));
  if (!args.cast.blocks)
    activation_amax_kernel<T, Gate><<<grid, 256, 0, stream>>>(args, plan.tiles, plan.amax);
  with_fp8_type(args.cast.type, [&](auto type) {
    if (args.cast.blocks)
      expert_block_activation_kernel<T, Gate, type()>
          <<<grid, kBlockThreads, 0, stream>>>(args, plan.tiles);
    else
      expert_activation_kernel<T, Gate, type()>
          <<<grid, 256, 0, stream>>>(args, plan.tiles, plan.amax);
  });
}

}  // namespace

void fp8_expert_activation_cuda(const Fp8ExpertActivation& args, void* stream) {
  const WeightedActivationArgs& act = args.activation;
  MEGATRON_ASSERT(act.features % (args.cast.blocks ? kFp8Block : 16) == 0 && !args.cast.square &&
                      args.cast.columns == act.features && is_aligned({act.x}),
                  "FP8 activation of experts with ", act.features, " features");
  if (act.rows == 0 || act.features == 0) return;
  with_cast_type(args.cast.dtype, [&](auto type) {
    using T = decltype(type);
    switch (act.kind) {
      case Activation::kSwiglu:
        return launch_activation<T, SiluGate>(args, as_stream(stream));
      case Activation::kGeglu:
        return launch_activation<T, GeluTanhGate>(args, as_stream(stream));
      case Activation::kQuickGeglu:
        return launch_activation<T, QuickGeluGate>(args, as_stream(stream));
      case Activation::kExactGeglu:
        return launch_activation<T, GeluGate>(args, as_stream(stream));
      default:
        MEGATRON_ASSERT(false, "FP8 output of an activation of experts that is not gated");
    }
  });
  check_cuda(cudaGetLastError(), "FP8 activation of experts");
}

}  // namespace megatron
