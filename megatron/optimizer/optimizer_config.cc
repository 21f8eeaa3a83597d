#include "megatron/optimizer/optimizer_config.h"

#include "megatron/base/value_checks.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {

void OptimizerConfig::validate(Violations& v) const {
  validate_topics(v);
  if (use_precision_aware_optimizer && !update_rule(*this).narrow_states) {
    std::string names;
    for (const UpdateRule* rule : update_rules())
      if (rule->narrow_states) names += cat(names.empty() ? "" : " or ", rule->name);
    v.add(cat("--use-precision-aware-optimizer supports only ", names), cat("--optimizer ", names));
  }
  if (optimizer_cpu_offload && update_rule(*this).needs_whole_matrices())
    v.add(cat("--optimizer-cpu-offload is not built for --optimizer ", optimizer),
          "its update needs whole matrices on the device");
  check_range("--optimizer-offload-fraction", optimizer_offload_fraction,
              optimizer_offload_fraction > 0 && optimizer_offload_fraction <= 1, "above 0, up to 1",
              v);
  if (optimizer_offload_fraction != 1.0 && !optimizer_cpu_offload)
    v.add("--optimizer-offload-fraction has no effect without --optimizer-cpu-offload",
          "give both");
  if (main_params_dtype == StateType::kBf16 && !bf16)
    v.add("--main-params-dtype bf16 needs weights in bf16", "--bf16");
}

}  // namespace megatron
