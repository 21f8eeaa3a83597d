// Elementary functions that give the same bits on the CPU and on CUDA, and that vectorise.
//
// Uses only additions, multiplications, explicit fused multiply-adds and correctly rounded square
// roots; compile with -ffp-contract=off (C++) or --fmad=false (CUDA). Errors are below 2 ulp in
// fp32; fp64 uses the standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define MEGATRON_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MEGATRON_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace megatron {

MEGATRON_HOST_DEVICE float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

MEGATRON_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

MEGATRON_HOST_DEVICE uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Numbers in the order of floating-point ones, equal for 0 and -0; NaN is the highest, and 0 is
// below all.
MEGATRON_HOST_DEVICE uint32_t order_key(float x) {
  const uint32_t bits = bits_from_float(x + 0.0f);  // -0 becomes 0
  const uint32_t key = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return x != x ? 0xffffffffu : key;
}
MEGATRON_HOST_DEVICE uint64_t order_key(double x) {
  const double sum = x + 0.0;
  uint64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  const uint64_t key = (bits >> 63) != 0 ? ~bits : bits | (uint64_t{1} << 63);
  return x != x ? ~uint64_t{0} : key;
}

// e^x. Overflows to infinity, underflows gradually to zero, keeps NaN.
MEGATRON_HOST_DEVICE float fast_exp(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = fused(x, 1.44269504f, magic);
  const float n = shifted - magic;
  float r = fused(n, -0.693359375f, x);
  r = fused(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;  // Cephes expf
  p = fused(p, r, 1.3981999507e-3f);
  p = fused(p, r, 8.3334519073e-3f);
  p = fused(p, r, 4.1665795894e-2f);
  p = fused(p, r, 1.6666665459e-1f);
  p = fused(p, r, 5.0000001201e-1f);
  p = fused(p, r * r, r + 1.0f);
  const int32_t k = static_cast<int32_t>(bits_from_float(shifted) - 0x4b400000u);
  const int32_t half = k >> 1;  // two factors, for subnormal results
  const float a = float_from_bits(static_cast<uint32_t>(half + 127) << 23);
  const float b = float_from_bits(static_cast<uint32_t>(k - half + 127) << 23);
  return p * a * b;
}

MEGATRON_HOST_DEVICE double fast_exp(double x) { return exp(x); }

// ln x for normal positive x.
MEGATRON_HOST_DEVICE float fast_log(float x) {
  const uint32_t bits = bits_from_float(x);
  // X = m * 2^e, m in [sqrt(1/2), sqrt(2))
  const int32_t e = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float m = float_from_bits(bits - (static_cast<uint32_t>(e) << 23));
  const float n = static_cast<float>(e);
  const float r = m - 1.0f;
  const float square = r * r;
  float p = 7.0376836292e-2f;  // Cephes logf
  p = fused(p, r, -1.1514610310e-1f);
  p = fused(p, r, 1.1676998740e-1f);
  p = fused(p, r, -1.2420140846e-1f);
  p = fused(p, r, 1.4249322787e-1f);
  p = fused(p, r, -1.6668057665e-1f);
  p = fused(p, r, 2.0000714765e-1f);
  p = fused(p, r, -2.4999993993e-1f);
  p = fused(p, r, 3.3333331174e-1f);
  p = p * r * square;
  p = fused(n, -2.12194440e-4f, p);
  p = fused(square, -0.5f, p);
  return fused(n, 0.693359375f, r + p);
}

// sin and cos of 2 pi * turn / 2^32.
MEGATRON_HOST_DEVICE void sincos_turn(uint32_t turn, float* sine, float* cosine) {
  const uint32_t quadrant = (turn + 0x20000000u) >> 30;
  const int32_t rest = static_cast<int32_t>(turn - (quadrant << 30));  // within an eighth of a turn
  const float t = static_cast<float>(rest) * 1.4629180793e-9f;         // 2 pi / 2^32
  const float z = t * t;
  float s = -1.9515295891e-4f;
  s = fused(s, z, 8.3321608736e-3f);
  s = fused(s, z, -1.6666654611e-1f);
  s = fused(s * z, t, t);
  float c = 2.443315711809948e-5f;
  c = fused(c, z, -1.388731625493765e-3f);
  c = fused(c, z, 4.166664568298827e-2f);
  c = fused(c * z, z, fused(z, -0.5f, 1.0f));
  const bool swap = (quadrant & 1u) != 0;
  const float sin_abs = swap ? c : s;
  const float cos_abs = swap ? s : c;
  const uint32_t sin_sign = (quadrant & 2u) << 30;
  const uint32_t cos_sign = ((quadrant + 1u) & 2u) << 30;
  *sine = float_from_bits(bits_from_float(sin_abs) ^ sin_sign);
  *cosine = float_from_bits(bits_from_float(cos_abs) ^ cos_sign);
}

MEGATRON_HOST_DEVICE float fast_sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }
MEGATRON_HOST_DEVICE double fast_sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

}  // namespace megatron
