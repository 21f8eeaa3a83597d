#include "megatron/media/detail/resample_passes.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace megatron::media {
namespace {

constexpr uint32_t kHalf = 1u << (kWeightBits - 1);
constexpr int kLowBits = 15;

// A sum with its rounding constant to 8 bits. Sums are taken modulo 2^32.
uint8_t rounded(uint32_t sum) {
  return static_cast<uint8_t>(std::clamp(static_cast<int32_t>(sum) >> kWeightBits, 0, 255));
}

// weight = low + high * 2^15, with low in [-2^14, 2^14): products with bytes, and sums of two of
// them, fit 32 bits.
int16_t low_part(int32_t weight) {
  const int32_t low = weight & ((1 << kLowBits) - 1);
  return static_cast<int16_t>(low >= 1 << (kLowBits - 1) ? low - (1 << kLowBits) : low);
}
int16_t high_part(int32_t weight) {
  return static_cast<int16_t>((weight - low_part(weight)) >> kLowBits);
}

// Two 16-bit numbers, the first one lower.
int32_t pair_of(int16_t first, int16_t second) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(second)) << 16 |
                              static_cast<uint16_t>(first));
}

__m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Sums of low and high products to results of 22 fractional bits less, not yet clamped.
__m256i finished(__m256i low, __m256i high) {
  const __m256i sum = _mm256_add_epi32(low, _mm256_slli_epi32(high, kLowBits));
  return _mm256_srai_epi32(_mm256_add_epi32(sum, _mm256_set1_epi32(kHalf)), kWeightBits);
}

}  // namespace

RowPass::RowPass(const AxisWeights& weights) : weights_(&weights) {
  const int64_t most =
      weights.taps.empty() ? 0 : *std::max_element(weights.taps.begin(), weights.taps.end());
  groups_ = (most + 3) / 4;
  parts_.assign(static_cast<size_t>(weights.count() * groups_ * 32), 0);
  int16_t* to = parts_.data();
  for (int64_t i = 0; i < weights.count(); ++i) {
    for (int64_t g = 0; g < groups_; ++g, to += 32) {
      for (int64_t j = 0; j < 4 && 4 * g + j < weights.taps[i]; ++j) {
        const int32_t weight = weights.of(i)[4 * g + j];
        // Lane j / 2; within it, pairs of pixels for each of three channels.
        int16_t* const lane = to + 8 * (j / 2) + j % 2;
        for (int channel = 0; channel < 3; ++channel) {
          lane[2 * channel] = low_part(weight);
          lane[2 * channel + 16] = high_part(weight);
        }
      }
    }
  }
}

void RowPass::run(const uint8_t* in, uint8_t* out) const {
  // From 12 bytes of four pixels to pairs of 16-bit numbers: pixels 0 and 1 in the lower lane, 2
  // and 3 in the upper one.
  const __m256i pairs =
      _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,  //
                       6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
  const int16_t* parts = parts_.data();
  for (int64_t i = 0; i < weights_->count(); ++i, out += 3) {
    const uint8_t* pixels = in + 3 * int64_t{weights_->first[i]};
    const int64_t groups = (weights_->taps[i] + 3) / 4;
    __m256i low = _mm256_setzero_si256(), high = low;
    for (int64_t g = 0; g < groups; ++g, pixels += 12) {
      const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pixels));
      const __m256i values = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(four), pairs);
      low = _mm256_add_epi32(low, _mm256_madd_epi16(values, load(parts + 32 * g)));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(values, load(parts + 32 * g + 16)));
    }
    parts += 32 * groups_;
    const __m256i both = _mm256_add_epi32(low, _mm256_slli_epi32(high, kLowBits));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    sum = _mm_srai_epi32(_mm_add_epi32(sum, _mm_set1_epi32(kHalf)), kWeightBits);
    const __m128i bytes = _mm_packus_epi16(_mm_packs_epi32(sum, sum), sum);
    const auto value = static_cast<uint32_t>(_mm_cvtsi128_si32(bytes));
    out[0] = static_cast<uint8_t>(value);
    out[1] = static_cast<uint8_t>(value >> 8);
    out[2] = static_cast<uint8_t>(value >> 16);
  }
}

void RowPass::run_plain(const uint8_t* in, uint8_t* out) const {
  for (int64_t i = 0; i < weights_->count(); ++i) {
    const uint8_t* pixels = in + 3 * int64_t{weights_->first[i]};
    const int32_t* weights = weights_->of(i);
    for (int channel = 0; channel < 3; ++channel) {
      uint32_t sum = kHalf;
      for (int32_t j = 0; j < weights_->taps[i]; ++j)
        sum += static_cast<uint32_t>(weights[j]) * pixels[3 * j + channel];
      *out++ = rounded(sum);
    }
  }
}

void column_sums_plain(const uint8_t* rows, int64_t row_bytes, const int32_t* weights, int32_t taps,
                       int64_t begin, int64_t end, uint8_t* out) {
  for (int64_t x = begin; x < end; ++x) {
    uint32_t sum = kHalf;
    for (int32_t j = 0; j < taps; ++j)
      sum += static_cast<uint32_t>(weights[j]) * rows[j * row_bytes + x];
    out[x] = rounded(sum);
  }
}

void column_sums(const uint8_t* rows, int64_t row_bytes, const int32_t* weights, int32_t taps,
                 int64_t bytes, uint8_t* out) {
  int64_t x = 0;
  for (; x + 16 <= bytes; x += 16) {
    const auto row = [&](int32_t j) {
      return _mm256_cvtepu8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + j * row_bytes + x)));
    };
    // Of bytes 0..3 and 8..11, and of 4..7 and 12..15.
    __m256i low_a = _mm256_setzero_si256(), low_b = low_a, high_a = low_a, high_b = low_a;
    for (int32_t j = 0; j < taps; j += 2) {
      const bool has_second = j + 1 < taps;
      const int32_t second_weight = has_second ? weights[j + 1] : 0;
      const __m256i first = row(j), second = has_second ? row(j + 1) : _mm256_setzero_si256();
      const __m256i a = _mm256_unpacklo_epi16(first, second);
      const __m256i b = _mm256_unpackhi_epi16(first, second);
      const __m256i low = _mm256_set1_epi32(pair_of(low_part(weights[j]), low_part(second_weight)));
      const __m256i high =
          _mm256_set1_epi32(pair_of(high_part(weights[j]), high_part(second_weight)));
      low_a = _mm256_add_epi32(low_a, _mm256_madd_epi16(a, low));
      low_b = _mm256_add_epi32(low_b, _mm256_madd_epi16(b, low));
      high_a = _mm256_add_epi32(high_a, _mm256_madd_epi16(a, high));
      high_b = _mm256_add_epi32(high_b, _mm256_madd_epi16(b, high));
    }
    // Packing undoes the order of unpacking: words 0..7 | 8..15.
    const __m256i words = _mm256_packs_epi32(finished(low_a, high_a), finished(low_b, high_b));
    const __m128i result =
        _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + x), result);
  }
  column_sums_plain(rows, row_bytes, weights, taps, x, bytes, out);
}

}  // namespace megatron::media
