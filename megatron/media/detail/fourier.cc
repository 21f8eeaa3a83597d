#include "megatron/media/detail/fourier.h"

#include <array>
#include <cmath>
#include <numbers>

#include "megatron/base/check.h"

namespace megatron::media {
namespace {

constexpr int64_t kLargestFactor = 8;

// std::complex's product looks for infinities.
Fourier::Complex times(Fourier::Complex a, Fourier::Complex b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

}  // namespace

Fourier::Fourier(int64_t length) : length_(length) {
  int64_t rest = length;
  for (const int64_t factor : {int64_t{4}, int64_t{5}, int64_t{2}, int64_t{3}, int64_t{7}})
    for (; rest % factor == 0; rest /= factor) factors_.push_back(factor);
  MEGATRON_ASSERT(rest == 1, "a length with a factor of ", rest);
  for (int64_t k = 0; k < length; ++k) {
    const double angle =
        -2 * std::numbers::pi * static_cast<double>(k) / static_cast<double>(length);
    roots_.emplace_back(std::cos(angle), std::sin(angle));
  }
}

void Fourier::run(const Complex* in, Complex* out) const { run(in, out, length_, 1, 0); }

void Fourier::run(const Complex* in, Complex* out, int64_t length, int64_t stride,
                  size_t factor) const {
  if (length == 1) {
    *out = *in;
    return;
  }
  const int64_t radix = factors_[factor], part = length / radix;
  for (int64_t r = 0; r < radix; ++r)
    run(in + r * stride, out + r * part, part, stride * radix, factor + 1);
  std::array<Complex, kLargestFactor> terms;
  for (int64_t k = 0; k < part; ++k) {
    for (int64_t r = 0; r < radix; ++r) terms[r] = times(out[r * part + k], roots_[r * k * stride]);
    for (int64_t q = 0; q < radix; ++q) {
      Complex sum = terms[0];
      for (int64_t r = 1; r < radix; ++r)
        sum += times(terms[r], roots_[r * q % radix * (length_ / radix)]);
      out[q * part + k] = sum;
    }
  }
}

}  // namespace megatron::media
