#include "megatron/dist_checkpointing/detail/convert.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace megatron {
namespace {

float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

float from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0)
    return std::copysign(std::ldexp(static_cast<float>(mantissa), -24), std::bit_cast<float>(sign));
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

// The nearest float; if inexact, the neighbour with an odd mantissa: rounding that to 16 bits then
// equals rounding the double directly.
float to_float_odd(double value) {
  float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || std::isnan(value) || std::isinf(nearest))
    return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (bits & 1) return nearest;
  const bool away = std::abs(static_cast<double>(nearest)) > std::abs(value);
  return std::bit_cast<float>(away ? bits - 1 : bits + 1);
}

uint16_t to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to infinity
  if (magnitude < 0x38800000)  // subnormal: the default rounding of nearbyint is to nearest even
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(
                                            std::ldexp(std::abs(static_cast<double>(value)), 24))));
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

template <class T>
T element(const void* in, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(in) + i * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

template <class T>
void put(void* out, int64_t i, T value) {
  std::memcpy(static_cast<char*>(out) + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

double load(const void* in, DType dtype, int64_t i) {
  if (dtype == DType::kFloat64) return element<double>(in, i);
  if (dtype == DType::kFloat32) return element<float>(in, i);
  if (dtype == DType::kBFloat16) return from_bfloat16(element<uint16_t>(in, i));
  return from_float16(element<uint16_t>(in, i));
}

void store(void* out, DType dtype, int64_t i, double value) {
  if (dtype == DType::kFloat64) return put(out, i, value);
  if (dtype == DType::kFloat32) return put(out, i, static_cast<float>(value));
  const float narrow = to_float_odd(value);
  put(out, i, dtype == DType::kBFloat16 ? to_bfloat16(narrow) : to_float16(narrow));
}

bool is_floating(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat16;
}

}  // namespace

bool is_convertible(DType from, DType to) { return is_floating(from) && is_floating(to); }

void convert_elements(const void* in, DType from, void* out, DType to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(out, to, i, load(in, from, i));
}

}  // namespace megatron
