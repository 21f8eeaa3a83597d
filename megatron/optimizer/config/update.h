// The update of the weights: its rule, weight decay, averages of gradients, clipping.
#pragma once

#include <optional>
#include <string>

#include "megatron/base/fields.h"
#include "megatron/kernels/step_control.h"

namespace megatron {

struct UpdateConfig {
  std::string optimizer = "adam";  // a name of update_rules()
  double weight_decay = 0.01;
  std::optional<double> start_weight_decay, end_weight_decay;
  WeightDecayIncrStyle weight_decay_incr_style = WeightDecayIncrStyle::kConstant;
  bool apply_wd_to_qk_layernorm = false;
  double adam_beta1 = 0.9, adam_beta2 = 0.999, adam_eps = 1e-8;
  double sgd_momentum = 0.9;
  double clip_grad = 1.0;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;
};

}  // namespace megatron
