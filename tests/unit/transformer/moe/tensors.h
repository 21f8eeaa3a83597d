// Small tensors from lists of numbers, and comparisons with them.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <vector>

#include "megatron/tensor/torch.h"

namespace megatron {

using Rows = std::vector<std::vector<double>>;

// [rows, columns] fp64.
inline at::Tensor matrix(const Rows& rows) {
  std::vector<at::Tensor> parts;
  for (const std::vector<double>& row : rows) parts.push_back(at::tensor(row, at::kDouble));
  return at::stack(parts);
}

inline at::Tensor vector(const std::vector<double>& numbers) {
  return at::tensor(numbers, at::kDouble);
}

inline at::Tensor random_matrix(at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::dtype(at::kDouble));
}

// Largest difference; of different shapes infinity, and of NaN NaN, which no bound holds.
inline double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  if (a.numel() == 0) return 0;
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

inline void expect_matrix(const at::Tensor& tensor, const Rows& expected, double bound = 1e-7) {
  EXPECT_LE(distance(tensor, matrix(expected)), bound) << tensor;
}

}  // namespace megatron
