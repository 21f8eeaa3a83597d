// SGD with momentum and coupled weight decay; see kernels/adamw.h for the formula.
#include "megatron/optimizer/update_rules.h"

namespace megatron {

const UpdateRule& sgd_rule() {
  static const UpdateRule rule = {
      .name = "sgd",
      .states = {{"momentum_buffer"}},
      .update = [](const OptimizerConfig& config, FlatUpdate& flat,
                   const at::Tensor& record) { sgd_update(flat, record, config.sgd_momentum); },
      .few_steps_lr = 1e-2,
  };
  return rule;
}

}  // namespace megatron
