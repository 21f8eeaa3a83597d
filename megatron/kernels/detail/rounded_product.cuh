#pragma once

namespace megatron {

// A product that is always rounded: the compiler contracts it into no addition.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

}  // namespace megatron
