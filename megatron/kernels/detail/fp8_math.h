// Scalar FP8 formulas, shared by the CPU and CUDA kernels.
#pragma once

#include "megatron/kernels/detail/math.h"
#include "megatron/kernels/fp8/fp8.h"

namespace megatron {

// The factor that scales `amax` to the largest finite value; 1 if it is 0 or infinite, as in
// Transformer Engine.
MEGATRON_HOST_DEVICE float fp8_scale(float amax, float largest) {
  if (!(amax > 0.0f) || amax > 3.4028234e38f) return 1.0f;
  const float scale = largest / amax;
  return scale > 3.4028234e38f ? 3.4028234e38f : scale;
}

// The same rounded down to a power of two: products with it and its inverse are exact.
MEGATRON_HOST_DEVICE float fp8_power_of_two_scale(float amax, float largest) {
  const float scale = fp8_scale(amax, largest);
  uint32_t bits;
  memcpy(&bits, &scale, sizeof bits);
  return float_from_bits(bits & 0xff800000u);
}

// The scale after a step of delayed scaling; the old one if `amax` gives none, initially 1.
MEGATRON_HOST_DEVICE float delayed_scale(float amax, float largest, float factor, float old) {
  if (!(amax > 0.0f) || amax > 3.4028234e38f) return old == 0.0f ? 1.0f : old;
  const float scale = largest / amax * factor;
  return scale > 3.4028234e38f ? 3.4028234e38f : scale;
}

// Rounds to the nearest code, ties to even; saturates at the largest finite value; NaN for NaN.
// Host only: the device has an instruction.
//   E4M3   1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, NaN 0x7f
//   E5M2   1 sign, 5 exponent (bias 15), 2 mantissa bits; NaN 0x7f
template <Fp8Type Type>
inline uint8_t fp8_code(float value) {
  constexpr bool kWide = Type == Fp8Type::kE5M2;
  constexpr uint32_t kShift = kWide ? 21 : 20;  // dropped mantissa bits
  constexpr uint32_t kBias = kWide ? 127 - 15 : 127 - 7;
  constexpr uint32_t kLargest = kWide ? 0x7b : 0x7e;
  constexpr uint32_t kLargestBits = kWide ? 0x47600000 : 0x43e00000;  // 57344, 448
  constexpr uint32_t kNormalBits = (kBias + 1) << 23;                 // the smallest normal value
  constexpr uint32_t kSubnormalBits = (kBias + 1 + 23 - (23 - kShift)) << 23;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 24) & 0x80u;
  bits &= 0x7fffffffu;
  const uint32_t odd = (bits >> kShift) & 1u;
  const uint32_t normal = (bits - (kBias << 23) + ((1u << (kShift - 1)) - 1) + odd) >> kShift;
  // Adding a power of two leaves the wanted bits, rounded, at the end of the mantissa.
  const float shifted =
      float_from_bits(bits < kNormalBits ? bits : 0u) + float_from_bits(kSubnormalBits);
  uint32_t shifted_bits;
  memcpy(&shifted_bits, &shifted, sizeof shifted_bits);
  uint32_t code = bits < kNormalBits ? shifted_bits - kSubnormalBits : normal;
  code = sign | (bits >= kLargestBits ? kLargest : code);
  return static_cast<uint8_t>(bits > 0x7f800000u ? 0x7fu : code);
}

// The value of a code of E4M3; exact.
MEGATRON_HOST_DEVICE float e4m3_value(uint8_t code) {
  const uint32_t rest = code & 0x7fu;
  // The bits of a float whose exponent is too low by the difference of the biases
  const float value = float_from_bits(rest << 20) * 1.329227995784916e36f;
  const float positive = rest == 0x7fu ? float_from_bits(0x7fc00000u) : value;
  return (code & 0x80u) != 0 ? -positive : positive;
}

}  // namespace megatron
