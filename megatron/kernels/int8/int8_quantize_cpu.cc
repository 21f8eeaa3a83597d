// Rows of weights and of activations as codes of 8 bits.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/int8/int8_product.h"

namespace megatron {
namespace {

constexpr int kLanes = 8;
constexpr float kLargestCode = 127.0f;

// Reads elements in the tail of a row as zeros.
__m256 load(const float* row, int64_t i, int64_t n) {
  if (i + kLanes <= n) return _mm256_loadu_ps(row + i);
  float tail[kLanes] = {};
  std::copy(row + i, row + n, tail);
  return _mm256_loadu_ps(tail);
}

// The scale of a row.
float scale_of(const float* row, int64_t n) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 largest = _mm256_setzero_ps(), invalid = largest;  // x * 0 is NaN where x is not finite
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m256 x = load(row, i, n);
    largest = _mm256_max_ps(largest, _mm256_and_ps(x, magnitude));
    invalid = _mm256_fmadd_ps(x, _mm256_setzero_ps(), invalid);
  }
  float lanes[kLanes], invalid_lanes[kLanes];
  _mm256_storeu_ps(lanes, largest);
  _mm256_storeu_ps(invalid_lanes, invalid);
  float most = 0.0f, sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) {
    most = std::max(most, lanes[i]);
    sum += invalid_lanes[i];
  }
  return most / kLargestCode + sum;
}

// Codes of a row, rounded to the nearest even, and zeros up to `padded`; zeros alone for a scale
// that is 0 or no number.
void cast_row(const float* row, int64_t n, int64_t padded, float scale, int8_t* codes) {
  const bool usable = scale > 0.0f && std::isfinite(scale);
  const __m256 factor = _mm256_set1_ps(usable ? 1.0f / scale : 0.0f);
  const __m256i low = _mm256_set1_epi32(-127), high = _mm256_set1_epi32(127);
  int64_t i = 0;
  for (; i < n && usable; i += kLanes) {
    __m256i code = _mm256_cvtps_epi32(_mm256_mul_ps(load(row, i, n), factor));
    code = _mm256_max_epi32(low, _mm256_min_epi32(high, code));
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    const __m128i bytes = _mm_packs_epi16(words, words);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), bytes);  // padded to a multiple of 64
  }
  if (i < padded) std::memset(codes + i, 0, static_cast<size_t>(padded - i));
}

}  // namespace

void int8_rows_cpu(const Int8Rows& args, int64_t row_begin, int64_t row_end) {
  const int64_t padded = int8_inner(args.inner);
  std::vector<float> scratch(static_cast<size_t>(args.inner));
  std::vector<int8_t> codes(static_cast<size_t>(padded));
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = load_run(args.dtype, args.x, row * args.inner, args.inner, scratch.data());
    args.scales[row] = scale_of(x, args.inner);
    cast_row(x, args.inner, padded, args.scales[row], codes.data());
    const Int8RowPlace place = int8_row_place(row, args.rows, args.inner);
    uint8_t* out = args.codes + place.first;
    for (int64_t i = 0; i < padded; i += kInt8InnerUnit, out += place.step)
      for (int64_t j = 0; j < kInt8InnerUnit; ++j)
        out[j] = static_cast<uint8_t>(codes[static_cast<size_t>(i + j)] ^ 0x80);  // + 128
  }
}

void int8_weights_cpu(const Int8Weights& args, int64_t panel_begin, int64_t panel_end) {
  constexpr int64_t kGroup = 4, kGroupBytes = kGroup * kInt8PanelOutputs;
  const int64_t padded = int8_inner(args.inner);
  std::vector<float> scratch(static_cast<size_t>(args.inner));
  std::vector<int8_t> codes(static_cast<size_t>(padded));
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    int8_t* const out = args.panels + panel * int8_panel_bytes(args.inner);
    for (int64_t column = 0; column < kInt8PanelOutputs; ++column) {
      const int64_t output = panel * kInt8PanelOutputs + column;
      if (output < args.outputs) {
        const float* w =
            load_run(args.dtype, args.w, output * args.inner, args.inner, scratch.data());
        args.scales[output] = scale_of(w, args.inner);
        cast_row(w, args.inner, padded, args.scales[output], codes.data());
      } else {
        std::fill(codes.begin(), codes.end(), int8_t{0});
      }
      int32_t sum = 0;
      for (int64_t k = 0; k < padded; k += kGroup) {
        std::memcpy(out + k / kGroup * kGroupBytes + column * kGroup, codes.data() + k, kGroup);
        for (int64_t i = 0; i < kGroup; ++i) sum += codes[static_cast<size_t>(k + i)];
      }
      std::memcpy(out + padded * kInt8PanelOutputs + column * static_cast<int64_t>(sizeof sum),
                  &sum, sizeof sum);
    }
  }
}

}  // namespace megatron
