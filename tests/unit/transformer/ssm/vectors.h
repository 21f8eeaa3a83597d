// Tensors of the published vectors of state-space layers: element i of u(c), row major from 0, is
// sin(1.3 c + 0.7 i).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "megatron/tensor/torch.h"

namespace megatron {

inline at::Tensor u(int64_t c, at::IntArrayRef shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return at::sin(1.3 * static_cast<double>(c) + 0.7 * at::arange(n, at::kDouble)).view(shape);
}

inline at::Tensor ids(const std::vector<int64_t>& of_tokens) {
  return at::tensor(of_tokens, at::kLong).unsqueeze(0);
}

inline double largest(const at::Tensor& x) { return x.abs().max().item<double>(); }

// Within 1e-11 of the numbers, which are printed with 12 digits.
inline void expect_vector(const at::Tensor& x, const std::vector<double>& expected,
                          const std::string& what) {
  ASSERT_EQ(x.numel(), static_cast<int64_t>(expected.size())) << what;
  const at::Tensor y = x.contiguous().view({-1});
  for (int64_t i = 0; i < y.numel(); ++i) {
    const double value = expected[static_cast<size_t>(i)];
    EXPECT_NEAR(y[i].item<double>(), value, 1e-11 * std::max(1.0, std::abs(value)))
        << what << ", element " << i;
  }
}

// Largest difference of a gradient from differences of f, of the loss sum(f() dy), over x in place.
template <class F>
double finite_difference_error(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& dy,
                               const F& f) {
  const at::Tensor flat = x.view({-1}), g = grad.contiguous().view({-1});
  double worst = 0;
  for (int64_t i = 0; i < flat.numel(); ++i) {
    const double value = flat[i].item<double>(), step = 1e-6;
    const auto loss = [&](double at) {
      flat[i].fill_(at);
      return (f() * dy).sum().template item<double>();
    };
    const double slope = (loss(value + step) - loss(value - step)) / (2 * step);
    flat[i].fill_(value);
    worst = std::max(worst, std::abs(slope - g[i].item<double>()));
  }
  return worst;
}

}  // namespace megatron
