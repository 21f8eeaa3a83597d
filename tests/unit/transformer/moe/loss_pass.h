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
  explicit LossPass(const BalanceOptions& options, int64_t layer_number = 1)
      : names(names_of(options, layer_number)),
        totals(at::zeros({static_cast<int64_t>(names.size()), 2}, at::kDouble)),
        losses({.names = names,
                .totals = totals,
                .gradient =
                    [](const at::Tensor&, const at::Tensor& weight, LossRows, std::string_view) {
                      EXPECT_FALSE(weight.defined()) << "divided by the weights of the tokens";
                      return at::full({}, kLossScale, at::kDouble);
                    }},
               tape) {
    context.training = true;
    context.tape = &tape;
    context.auxiliary_losses = &losses;
  }
  LossPass(const LossPass&) = delete;
  static std::vector<std::string> names_of(const BalanceOptions& options, int64_t layer_number) {
    std::vector<std::string> names;
    for (const std::string_view name : balance_loss_names(options)) names.emplace_back(name);
    if (options.per_layer)
      for (const std::string& name : layer_loss_names(options, layer_number)) names.push_back(name);
    return names;
  }
  std::vector<std::string> names;
  at::Tensor totals;
  RecomputeTape tape;
  AuxiliaryLosses losses;
  ForwardContext context;
};

}  // namespace megatron
