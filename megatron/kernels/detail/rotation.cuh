// Rotation of a pair of features by an angle, for all kernels that rotate: the same bits wherever
// it is done.
#pragma once

#include "megatron/kernels/detail/rounded_product.cuh"

namespace megatron {

__device__ __forceinline__ float minus_product(float x, float y, float z) {
  return __fmaf_rn(-y, z, x);
}
__device__ __forceinline__ double minus_product(double x, double y, double z) {
  return __fma_rn(-y, z, x);
}

// first = x cosine - y sine, second = y cosine + x sine.
template <class T>
__device__ __forceinline__ void rotate_pair(T x, T y, T cosine, T sine, T& first, T& second) {
  first = minus_product(rounded_product(x, cosine), y, sine);
  second = minus_product(rounded_product(y, cosine), -x, sine);
}

}  // namespace megatron
