#include <immintrin.h>

#include <bit>
#include <type_traits>

#include "megatron/base/check.h"
#include "megatron/kernels/detail/block_io.h"

namespace megatron {
namespace {

float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

void widen_half(const uint16_t* in, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < n; ++i) out[i] = _cvtsh_ss(in[i]);
}

void narrow_half(const float* in, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; ++i) out[i] = _cvtss_sh(in[i], _MM_FROUND_TO_NEAREST_INT);
}

}  // namespace

template <>
const float* load_run(DType dtype, const void* data, int64_t offset, int64_t n, float* scratch) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data) + offset;
    case DType::kBFloat16: {
      const uint16_t* in = static_cast<const uint16_t*>(data) + offset;
      for (int64_t i = 0; i < n; ++i) scratch[i] = from_bf16(in[i]);
      return scratch;
    }
    case DType::kFloat16:
      widen_half(static_cast<const uint16_t*>(data) + offset, n, scratch);
      return scratch;
    default:
      MEGATRON_ASSERT(false, "no fp32 kernel for ", to_string(dtype));
      return nullptr;
  }
}

template <>
const double* load_run(DType dtype, const void* data, int64_t offset, int64_t n, double* scratch) {
  if (dtype == DType::kFloat64) return static_cast<const double*>(data) + offset;
  constexpr int64_t kStep = 256;
  float narrow[kStep];
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t count = n - i < kStep ? n - i : kStep;
    const float* in = load_run<float>(dtype, data, offset + i, count, narrow);
    for (int64_t j = 0; j < count; ++j) scratch[i + j] = in[j];
  }
  return scratch;
}

template <>
float* output_run(DType dtype, void* data, int64_t offset, float* scratch) {
  return dtype == DType::kFloat32 ? static_cast<float*>(data) + offset : scratch;
}

template <>
double* output_run(DType dtype, void* data, int64_t offset, double* scratch) {
  return dtype == DType::kFloat64 ? static_cast<double*>(data) + offset : scratch;
}

template <>
void store_run(DType dtype, void* data, int64_t offset, int64_t n, const float* run) {
  switch (dtype) {
    case DType::kFloat32:
      if (float* out = static_cast<float*>(data) + offset; out != run) {
        for (int64_t i = 0; i < n; ++i) out[i] = run[i];
      }
      return;
    case DType::kBFloat16: {
      uint16_t* out = static_cast<uint16_t*>(data) + offset;
      for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(run[i]);
      return;
    }
    case DType::kFloat16:
      narrow_half(run, n, static_cast<uint16_t*>(data) + offset);
      return;
    default:
      MEGATRON_ASSERT(false, "no fp32 kernel for ", to_string(dtype));
  }
}

template <>
void store_run(DType dtype, void* data, int64_t offset, int64_t n, const double* run) {
  if (dtype == DType::kFloat64) {
    if (double* out = static_cast<double*>(data) + offset; out != run) {
      for (int64_t i = 0; i < n; ++i) out[i] = run[i];
    }
    return;
  }
  constexpr int64_t kStep = 256;
  float narrow[kStep];
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t count = n - i < kStep ? n - i : kStep;
    for (int64_t j = 0; j < count; ++j) narrow[j] = static_cast<float>(run[i + j]);
    store_run<float>(dtype, data, offset + i, count, narrow);
  }
}

}  // namespace megatron
