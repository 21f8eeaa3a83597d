#include <algorithm>

#include "megatron/kernels/detail/amax.cuh"
#include "megatron/kernels/detail/fp8_tile.cuh"
#include "megatron/kernels/fp8/fp8.h"

namespace megatron {
namespace {

// Runs from the end (Note [Backwards]).
template <class T>
__global__ void amax_kernel(Amax args) {
  __shared__ float shared[33];
  constexpr int kSize = Pack<T>::kSize, kUnroll = 4;
  const T* x = static_cast<const T*>(args.x);
  const int64_t packs = args.count / kSize, step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  float amax = 0.0f;
  for (int64_t i = first; i < packs; i += kUnroll * step) {
    Pack<T> in[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (i + u * step < packs) in[u] = load_group<Pack<T>>(x + (packs - 1 - i - u * step) * kSize);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) amax = larger(amax, load_as<float>(in[u].at[j]));
    }
  }
  const int64_t tail = packs * kSize + first;
  if (tail < args.count) amax = larger(amax, load_as<float>(x[tail]));
  raise_amax(args.amax, amax, shared);
}

// One thread block per tile.
template <class T, Fp8Type Type>
__global__ void __launch_bounds__(256) cast_kernel(Fp8Cast args) {
  __shared__ __align__(16) uint32_t turned[kTileWords];
  __shared__ float shared[33];
  const TilePlace at(blockIdx.x, args.rows, args.columns);
  Eight<T> in[kThreadRows] = {};
  if (at.inside) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
      in[r].load(static_cast<const T*>(args.x) + (at.row + r) * args.columns + at.column);
  }
  float scale = args.amax != nullptr ? fp8_scale(*args.amax, largest_of(Type)) : *args.given_scale;
  if (scale == 0.0f) scale = 1.0f;
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
      amax = larger(amax, x[c]);
      x[c] *= scale;
    }
    codes.left[r] = codes_of<Type>(x[0], x[1], x[2], x[3]);
    codes.right[r] = codes_of<Type>(x[4], x[5], x[6], x[7]);
  }
  if (args.in_rows != nullptr) store_rows(codes, at, args.in_rows, args.columns);
  if (args.new_amax != nullptr) raise_amax(args.new_amax, amax, shared);
  if (args.in_columns == nullptr) return;
  turn_codes(codes, at, turned);
  __syncthreads();
  store_columns(turned, at, args.in_columns, args.rows, args.columns);
}

// One thread block per 128 x 128 elements.
template <class T, Fp8Type Type>
__global__ void __launch_bounds__(kBlockThreads, 2) block_cast_kernel(Fp8BlockCast args) {
  __shared__ BlockMemory memory;
  const BlockPlace at(blockIdx.x, args.columns);
  BlockValues<T> in;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
    in[r].load(static_cast<const T*>(args.x) + (at.row() + r) * args.columns + at.column());
  store_block<T, Type>(in, at, args, at.block_column, memory);
}

// One thread block per slot.
__global__ void delayed_scale_update_kernel(DelayedScaleUpdate args) {
  __shared__ float shared[33];
  const int64_t slot = blockIdx.x;
  float* scale = args.state + slot * (1 + args.history_length);
  float* history = scale + 1;
  const float newest = args.amax[slot];
  if (args.keep_unmeasured && newest == 0.0f) return;
  float most = 0.0f;
  // From the oldest on, blockDim.x entries at a time: overwritten entries have been read before.
  for (int64_t end = args.history_length; end > 0; end -= blockDim.x) {
    const int64_t i = end - 1 - static_cast<int64_t>(threadIdx.x);
    const float moved = i > 0 ? history[i - 1] : newest;
    __syncthreads();
    if (i >= 0) {
      history[i] = moved;
      most = fmaxf(most, moved);
    }
    __syncthreads();
  }
  most = reduce_block(most, MaxOp{}, shared);
  if (threadIdx.x != 0) return;
  const float largest = largest_of(slot % 3 == 2 ? args.gradient_type : Fp8Type::kE4M3);
  *scale = delayed_scale(args.most_recent ? newest : most, largest, args.factor, *scale);
  args.amax[slot] = 0.0f;
}

}  // namespace

void amax_cuda(const Amax& args, void* stream) {
  MEGATRON_ASSERT(is_aligned({args.x}), "amax of a tensor that is not 16-byte aligned");
  with_cast_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const unsigned blocks = std::min(kAmaxBlocks, blocks_for(args.count / (Pack<T>::kSize * 4)));
    amax_kernel<T><<<blocks, kThreads, 0, as_stream(stream)>>>(args);
  });
  check_cuda(cudaGetLastError(), "amax");
}

void fp8_cast_cuda(const Fp8Cast& args, void* stream) {
  MEGATRON_ASSERT(args.rows % 16 == 0 && args.columns % 16 == 0 &&
                      is_aligned({args.x, args.in_rows, args.in_columns}),
                  "FP8 cast of [", args.rows, ", ", args.columns,
                  "]: expected multiples of 16, 16-byte aligned");
  if (args.rows == 0 || args.columns == 0) return;
  const int64_t tiles =
      (args.rows + kTileRows - 1) / kTileRows * ((args.columns + kTileColumns - 1) / kTileColumns);
  with_cast_type(args.dtype, [&](auto x) {
    with_fp8_type(args.type, [&](auto type) {
      cast_kernel<decltype(x), type()>
          <<<static_cast<unsigned>(tiles), 256, 0, as_stream(stream)>>>(args);
    });
  });
  check_cuda(cudaGetLastError(), "FP8 cast");
}

void fp8_block_cast_cuda(const Fp8BlockCast& args, void* stream) {
  MEGATRON_ASSERT(args.rows % kFp8Block == 0 && args.columns % kFp8Block == 0 &&
                      is_aligned({args.x, args.in_rows, args.in_columns}),
                  "FP8 block cast of [", args.rows, ", ", args.columns,
                  "]: expected multiples of 128, 16-byte aligned");
  const int64_t blocks = args.rows / kFp8Block * (args.columns / kFp8Block);
  if (blocks == 0) return;
  with_cast_type(args.dtype, [&](auto x) {
    with_fp8_type(args.type, [&](auto type) {
      block_cast_kernel<decltype(x), type()>
          <<<static_cast<unsigned>(blocks), kBlockThreads, 0, as_stream(stream)>>>(args);
    });
  });
  check_cuda(cudaGetLastError(), "FP8 block cast");
}

void delayed_scale_update_cuda(const DelayedScaleUpdate& args, void* stream) {
  if (args.slots == 0) return;
  delayed_scale_update_kernel<<<static_cast<unsigned>(args.slots), 256, 0, as_stream(stream)>>>(
      args);
  check_cuda(cudaGetLastError(), "delayed scale update");
}

}  // namespace megatron
