// AdamW; see kernels/adamw.h for the formula.
#include "megatron/base/check.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {
namespace {

// Adam divides what should be a zero gradient by epsilon: with 1e-8, rounding alone moves a weight
// as far as a gradient does.
std::string raise_adam_eps(OptimizerConfig& config) {
  constexpr double kLeastEps = 1e-5;
  if (config.adam_eps >= kLeastEps) return {};
  std::string change = cat("--adam-eps ", config.adam_eps, " -> ", kLeastEps);
  config.adam_eps = kLeastEps;
  return change;
}

}  // namespace

const UpdateRule& adam_rule() {
  static const UpdateRule rule = {
      .name = "adam",
      .states = {{"exp_avg", &OptimizerConfig::exp_avg_dtype},
                 {"exp_avg_sq", &OptimizerConfig::exp_avg_sq_dtype}},
      .narrow_states = true,
      .update =
          [](const OptimizerConfig& config, FlatUpdate& flat, const at::Tensor& record) {
            adamw_update(flat, record, {config.adam_beta1, config.adam_beta2, config.adam_eps});
          },
      .few_steps_lr = 1e-3,
      .bound_rounding = raise_adam_eps,
  };
  return rule;
}

}  // namespace megatron
