// Comparison of tensors for the tests of this folder.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/tensor/torch.h"

namespace megatron {

// Largest absolute difference divided by max(1, largest reference).
inline double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes()) return 1e300;
  if (got.numel() == 0) return 0.0;
  const at::Tensor a = got.detach().to(at::kCPU, at::kDouble),
                   b = expected.detach().to(at::kCPU, at::kDouble);
  const double error = (a - b).abs().max().item<double>();
  return error == error ? error / std::max(1.0, b.abs().max().item<double>()) : 1e300;
}

// Random numbers of ATen's generator with a fixed seed.
inline at::Tensor draw(at::IntArrayRef shape, at::ScalarType type = at::kDouble,
                       uint64_t seed = 1) {
  at::manual_seed(seed);
  return at::randn(shape, at::kDouble).to(type);
}

}  // namespace megatron
