#include "megatron/comm/detail/reduce_in_order.h"

#include <bit>
#include <cstring>

#include "megatron/base/check.h"

namespace megatron {
namespace {

float half_bits_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t float_to_half_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal: let the addition of 0.5 round to nearest even
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float bfloat_bits_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t float_to_bfloat_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class T>
T combine(T a, T b, ReduceOp op) {
  if (op == ReduceOp::kSum) return static_cast<T>(a + b);
  return b > a || b != b ? b : a;  // a NaN wins
}

template <class T>
void reduce_plain(const std::vector<const char*>& inputs, char* output, int64_t count,
                  ReduceOp op) {
  T* out = reinterpret_cast<T*>(output);
  if (output != inputs[0]) std::memcpy(out, inputs[0], count * sizeof(T));
  for (size_t r = 1; r < inputs.size(); ++r) {
    const T* in = reinterpret_cast<const T*>(inputs[r]);
    for (int64_t i = 0; i < count; ++i) out[i] = combine(out[i], in[i], op);
  }
}

template <float (*Load)(uint16_t), uint16_t (*Store)(float)>
void reduce_16bit(const std::vector<const char*>& inputs, char* output, int64_t count,
                  ReduceOp op) {
  uint16_t* out = reinterpret_cast<uint16_t*>(output);
  for (int64_t i = 0; i < count; ++i) {
    float value = Load(reinterpret_cast<const uint16_t*>(inputs[0])[i]);
    for (size_t r = 1; r < inputs.size(); ++r) {
      value = combine(value, Load(reinterpret_cast<const uint16_t*>(inputs[r])[i]), op);
    }
    out[i] = Store(value);
  }
}

}  // namespace

void reduce_in_order(const std::vector<const char*>& inputs, char* output, int64_t count,
                     DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat64:
      return reduce_plain<double>(inputs, output, count, op);
    case DType::kFloat32:
      return reduce_plain<float>(inputs, output, count, op);
    case DType::kInt64:
      return reduce_plain<int64_t>(inputs, output, count, op);
    case DType::kInt32:
      return reduce_plain<int32_t>(inputs, output, count, op);
    case DType::kBFloat16:
      return reduce_16bit<bfloat_bits_to_float, float_to_bfloat_bits>(inputs, output, count, op);
    case DType::kFloat16:
      return reduce_16bit<half_bits_to_float, float_to_half_bits>(inputs, output, count, op);
    default:
      break;
  }
  throw_error(
      cat("reduction of ", to_string(dtype),
          " is not supported between CPU ranks\nhint: types: F64, F32, BF16, F16, I64, I32"));
}

}  // namespace megatron
