// One training pass that takes the losses of routers.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "megatron/transformer/moe/balance.h"

namespace megatron {

inline constexpr double kLossScale = 8.0;  // of the loss

// One pass: its losses, what they receive and give.
struct LossPass {
  explicit LossPass(const BalanceOptions& options, at::ScalarType type = at::kDouble)
      : names(names_of(options)),
        totals(at::zeros({static_cast<int64_t>(names.size()), 2}, at::kDouble)),
        losses({.names = names,
                .totals = totals,
                .gradient =
                    [type](const at::Tensor&, const at::Tensor& weight, LossRows) {
                      EXPECT_FALSE(weight.defined()) << "divided by the weights of the tokens";
                      return at::full({}, kLossScale, type);
                    }},
               tape) {
    context.training = true;
    context.tape = &tape;
    context.auxiliary_losses = &losses;
  }
  LossPass(const LossPass&) = delete;
  static std::vector<std::string> names_of(const BalanceOptions& options) {
    const std::vector<std::string_view> names = balance_loss_names(options);
    return {names.begin(), names.end()};
  }
  std::vector<std::string> names;
  at::Tensor totals;
  RecomputeTape tape;
  AuxiliaryLosses losses;
  ForwardContext context;
};

}  // namespace megatron
