// Largest absolute values on CUDA.
#pragma once

#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {

// max(amax, |x|); NaN is ignored.
__device__ __forceinline__ float larger(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// *amax = max(*amax, value of any thread of the block), exact in any order. Called by the whole
// block; `shared` as for reduce_block. Non-negative floats are ordered like integers.
__device__ __forceinline__ void raise_amax(float* amax, float value, float* shared) {
  const float most = reduce_block(value, MaxOp{}, shared);
  if (threadIdx.x != 0) return;
  if (most > *static_cast<volatile float*>(amax))
    atomicMax(reinterpret_cast<int*>(amax), __float_as_int(most));
}

// The same for a warp, for blocks of any shape; called by whole warps.
__device__ __forceinline__ void raise_amax_by_warp(float* amax, float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (threadIdx.x % 32 == 0 && value > *static_cast<volatile float*>(amax))
    atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

// Grid size of kernels that raise an amax: enough to fill any GPU, few enough to avoid contention.
constexpr unsigned kAmaxBlocks = 2112;

}  // namespace megatron
