// Flags of preference optimisation (finetune --task dpo).
#pragma once

#include "megatron/base/fields.h"

namespace megatron {

struct DpoConfig : Config {
  double dpo_beta = 0.1;             // strength of the KL constraint to the reference model
  double dpo_label_smoothing = 0.0;  // probability that a preference label is flipped
  double dpo_sft_weight = 0.0;       // weight of the loss per token of the preferred response

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

}  // namespace megatron
