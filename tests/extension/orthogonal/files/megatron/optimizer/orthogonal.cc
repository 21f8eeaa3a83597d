// Orthogonalised momentum: the update of a matrix is the nearest orthogonal matrix to its momentum,
// so that every direction moves alike; other parameters are updated by AdamW. The iteration and its
// coefficients are those of Muon (Jordan et al. 2024).
//
//   M <- momentum M + g      U = orthogonal(g + momentum M)
//   W <- (1 - lr decay) W - lr sqrt(max(1, rows / columns)) U
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "megatron/optimizer/update_rules.h"
#include "megatron/tensor/torch.h"

namespace megatron {

const UpdateRule& adam_rule();  // adam.cc

namespace {

constexpr int kIterations = 5;
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

// Newton-Schulz: every singular value of X moves towards 1 by a x + b x^3 + c x^5. It begins with
// norm 1, so that none is above 1.
at::Tensor orthogonal(const at::Tensor& matrix) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;  // the smaller product
  x = x / (x.norm() + 1e-7);
  for (int i = 0; i < kIterations; ++i) {
    const at::Tensor square = x.mm(x.t());
    x = kA * x + (kB * square + kC * square.mm(square)).mm(x);
  }
  return tall ? x.t() : x;
}

// A number of the record, [] on its device.
at::Tensor number(const at::Tensor& record, size_t offset, at::ScalarType type) {
  return record.narrow(0, static_cast<int64_t>(offset), 8).view(type).reshape({});
}

void update_matrix(const OptimizerConfig& config, MatrixUpdate& matrix, const at::Tensor& record) {
  const auto real = [&](size_t offset) { return number(record, offset, at::kDouble); };
  const at::Tensor skip = number(record, offsetof(StepState, skip), at::kLong) != 0;
  const at::Tensor lr =
      matrix.lr_factor * real(offsetof(StepState, lr) + sizeof(double) * matrix.lr_group);
  const at::Tensor decay = lr * real(offsetof(StepState, weight_decay)) * matrix.weight_decay_mult;

  const at::Tensor grad = matrix.grad * real(offsetof(StepState, grad_factor));
  at::Tensor& momentum = matrix.states[0];
  const at::Tensor next = config.sgd_momentum * momentum + grad;
  const at::Tensor direction = orthogonal(grad + config.sgd_momentum * next);
  const double shape = static_cast<double>(grad.size(0)) / static_cast<double>(grad.size(1));
  const at::Tensor master =
      matrix.master * (1 - decay) - lr * std::sqrt(std::max(1.0, shape)) * direction;
  momentum.copy_(at::where(skip, momentum, next));
  matrix.master.copy_(at::where(skip, matrix.master, master));
}

}  // namespace

const UpdateRule& orthogonal_rule() {
  static const UpdateRule rule = {
      .name = "orthogonal",
      .states = {{"exp_avg"}, {"exp_avg_sq"}},
      .update = adam_rule().update,
      .update_matrix = update_matrix,
      .matrix_states = {{"momentum_buffer"}},
      .few_steps_lr = adam_rule().few_steps_lr,
      .bound_rounding = adam_rule().bound_rounding,
  };
  return rule;
}

}  // namespace megatron
