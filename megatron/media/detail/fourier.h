// The discrete Fourier transform of a length with small factors.
#pragma once

#include <complex>
#include <cstdint>
#include <vector>

namespace megatron::media {

class Fourier {
 public:
  using Complex = std::complex<double>;

  explicit Fourier(int64_t length);
  // out[k] = sum over n of in[n] exp(-2 pi i k n / length).
  void run(const Complex* in, Complex* out) const;

 private:
  // Of in[0], in[stride], ...: `length` of them, which the factors from `factor` on divide.
  void run(const Complex* in, Complex* out, int64_t length, int64_t stride, size_t factor) const;

  int64_t length_;
  std::vector<int64_t> factors_;
  std::vector<Complex> roots_;  // exp(-2 pi i k / length)
};

}  // namespace megatron::media
