#include "megatron/kernels/detail/fp8_tile.cuh"
#include "megatron/kernels/detail/norm_rows.cuh"
#include "megatron/kernels/fp8/fp8_norm.h"

// Two kernels: the statistics of the rows, from the last row to the first, then tiles from the
// first row on, which the L2 cache still holds since the first kernel read them last.
namespace megatron {
namespace {

// One thread block per tile.
template <class T, class W, bool LayerNorm, Fp8Type Type>
__global__ void __launch_bounds__(256) fp8_norm_kernel(Fp8Norm args) {
  __shared__ __align__(16) uint32_t turned[kTileWords];
  __shared__ float shared[33];
  const NormForward& norm = args.norm;
  const TilePlace at(blockIdx.x, norm.rows, norm.columns);
  Eight<T> in[kThreadRows] = {};
  float mean[kThreadRows] = {}, rstd[kThreadRows] = {}, gain[kThreadColumns] = {},
        bias[kThreadColumns] = {};
  const bool biased = LayerNorm && norm.bias != nullptr;
  if (at.inside) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      in[r].load(static_cast<const T*>(norm.x) + (at.row + r) * norm.columns + at.column);
      if constexpr (LayerNorm) mean[r] = static_cast<const float*>(norm.mean)[at.row + r];
      rstd[r] = static_cast<const float*>(norm.rstd)[at.row + r];
    }
    load_gain<W>(norm, at.column, gain);
    if (biased) load_weights<W>(norm.bias, at.column, bias);
  }
  const float given = *args.given_scale, scale = given == 0.0f ? 1.0f : given;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.scale[0] = scale;
    args.scale[kFp8InverseAt] = 1.0f / scale;
  }
  TileCodes codes;
  float amax = 0.0f;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x[kThreadColumns];
    in[r].get(x);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const float scaled = (x[c] - mean[r]) * rstd[r] * gain[c];
      x[c] = biased ? scaled + bias[c] : scaled;
    }
    Eight<T> rounded;
    rounded.set(x);
    rounded.get(x);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      amax = larger(amax, x[c]);
      x[c] *= scale;
    }
    codes.left[r] = codes_of<Type>(x[0], x[1], x[2], x[3]);
    codes.right[r] = codes_of<Type>(x[4], x[5], x[6], x[7]);
  }
  store_rows(codes, at, args.in_rows, norm.columns);
  if (args.new_amax != nullptr) raise_amax(args.new_amax, at.inside ? amax : 0.0f, shared);
  if (args.in_columns == nullptr) return;
  turn_codes(codes, at, turned);
  __syncthreads();
  store_columns(turned, at, args.in_columns, norm.rows, norm.columns);
}

template <class T, bool LayerNorm, Fp8Type Type>
void launch(const Fp8Norm& args, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(num_tiles(args.norm.rows, args.norm.columns));
  with_weight_type<T>(args.norm, [&](auto weight) {
    fp8_norm_kernel<T, decltype(weight), LayerNorm, Type><<<tiles, 256, 0, stream>>>(args);
  });
}

}  // namespace

void fp8_norm_cuda(const Fp8Norm& args, void* stream) {
  const NormForward& norm = args.norm;
  MEGATRON_ASSERT(norm.rows % 16 == 0 && norm.columns % 16 == 0 &&
                      is_aligned({norm.x, norm.gain, norm.bias, args.in_rows, args.in_columns}),
                  "FP8 norm of [", norm.rows, ", ", norm.columns,
                  "]: expected multiples of 16, 16-byte aligned");
  MEGATRON_ASSERT(!norm.saved_statistics && (norm.layer_norm || norm.bias == nullptr),
                  "FP8 norm from saved statistics, or RMSNorm with a bias");
  if (norm.rows == 0) return;
  NormForward statistics = norm;
  statistics.y = nullptr;
  statistics.amax = nullptr;
  norm_forward_cuda(statistics, stream);
  with_cast_type(norm.dtype, [&](auto x) {
    with_fp8_type(args.type, [&](auto type) {
      using T = decltype(x);
      norm.layer_norm ? launch<T, true, type()>(args, as_stream(stream))
                      : launch<T, false, type()>(args, as_stream(stream));
    });
  });
  check_cuda(cudaGetLastError(), "FP8 norm");
}

}  // namespace megatron
