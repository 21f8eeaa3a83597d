// Rotation of a pair of features by an angle, for all kernels that rotate: the same bits wherever
// it is done.
#pragma once

namespace megatron {

__device__ __forceinline__ float minus_product(float x, float y, float z) {
  return __fmaf_rn(-y, z, x);
}
__device__ __forceinline__ double minus_product(double x, double y, double z) {
  return __fma_rn(-y, z, x);
}
__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double product(double x, double y) { return __dmul_rn(x, y); }

// first = x cosine - y sine, second = y cosine + x sine.
template <class T>
__device__ __forceinline__ void rotate_pair(T x, T y, T cosine, T sine, T& first, T& second) {
  first = minus_product(product(x, cosine), y, sine);
  second = minus_product(product(y, cosine), -x, sine);
}

}  // namespace megatron
