// Tensors of the published vectors of state-space layers: element i of u(c), row major from 0, is
// sin(1.3 c + 0.7 i).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/causal_conv.h"

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

// Largest difference of the slopes of the loss sum(f() dy) along three directions of x, which f
// reads, from those that a gradient says.
template <class F>
double slope_error(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& dy, const F& f) {
  const at::Tensor start = x.clone();
  double worst = 0;
  for (const int64_t direction : {51, 52, 53}) {
    const at::Tensor along = u(direction, {x.numel()}).view(x.sizes());
    const double step = 1e-6;
    const auto loss = [&](double distance) {
      x.copy_(start + distance * along);
      return (f() * dy).sum().template item<double>();
    };
    const double slope = (loss(step) - loss(-step)) / (2 * step);
    worst = std::max(worst, std::abs(slope - (grad * along).sum().template item<double>()));
  }
  x.copy_(start);
  return worst;
}

// Documents of two sequences of at least 32 tokens, as document_runs() numbers them.
inline at::Tensor runs_of_two_sequences(int64_t s) {
  at::Tensor of_tokens = at::zeros({2, s}, at::kLong);
  of_tokens.narrow(1, 5, s - 5) += 1;
  of_tokens[0].narrow(0, 6, s - 6) += 1;
  of_tokens[0].narrow(0, 16, s - 16) += 1;
  of_tokens[1].narrow(0, 31, s - 31) += 1;
  return document_runs(of_tokens);
}

}  // namespace megatron
