#include "megatron/training/arguments/dpo_config.h"

#include "megatron/base/check.h"

namespace megatron {

void DpoConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("preference optimisation");
  v.field("dpo_beta", dpo_beta,
          "dpo: how strongly the model is held to the reference; rewards are this times the "
          "log-ratio of the two");
  v.field("dpo_label_smoothing", dpo_label_smoothing,
          "dpo: probability that a preference is the wrong way round");
  v.field("dpo_sft_weight", dpo_sft_weight,
          "dpo: weight of the loss per token of the preferred response, added to each pair's loss");
}

void DpoConfig::validate(Violations& violations) const {
  if (!(dpo_beta > 0)) violations.add(cat("--dpo-beta ", dpo_beta, " must be positive"));
  if (!(dpo_label_smoothing >= 0 && dpo_label_smoothing < 0.5))
    violations.add(cat("--dpo-label-smoothing ", dpo_label_smoothing, " is outside [0, 0.5)"));
  if (!(dpo_sft_weight >= 0))
    violations.add(cat("--dpo-sft-weight ", dpo_sft_weight, " is negative"));
}

}  // namespace megatron
