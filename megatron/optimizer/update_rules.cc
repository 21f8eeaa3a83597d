#include "megatron/optimizer/update_rules.h"

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

using MakeRule = const UpdateRule&();
// The rule that a file defines as NAME_rule().
#define MEGATRON_RULE(name)      \
  [] {                           \
    extern MakeRule name##_rule; \
    return &name##_rule();       \
  }()

const std::vector<const UpdateRule*>& update_rules() {
  static const std::vector<const UpdateRule*> rules = {
      MEGATRON_RULE(adam),
      MEGATRON_RULE(sgd),
  };
  return rules;
}

#undef MEGATRON_RULE

const UpdateRule& update_rule(const OptimizerConfig& config) {
  for (const UpdateRule* rule : update_rules())
    if (rule->name == config.optimizer) return *rule;
  throw UsageError(cat("--optimizer is ", config.optimizer, ", expected one of ",
                       listed(update_rules(), &UpdateRule::name)));
}

bool keeps_masters(const OptimizerConfig& config, bool half_model) {
  return half_model && config.main_params_dtype == StateType::kFp32;
}

std::vector<OptimizerState> optimizer_states(const UpdateRule& rule, const OptimizerConfig& config,
                                             bool half_model, UpdateKind kind) {
  std::vector<OptimizerState> all;
  if (keeps_masters(config, half_model)) all.push_back({"fp32_param"});
  for (const UpdateRule::State& state :
       kind == UpdateKind::kMatrix ? rule.matrix_states : rule.states)
    all.push_back({state.name, state.type == nullptr ? StateType::kFp32 : config.*state.type});
  return all;
}

int64_t optimizer_state_bytes(const UpdateRule& rule, const OptimizerConfig& config,
                              bool half_model, UpdateKind kind) {
  int64_t bytes = 0;
  for (const OptimizerState& state : optimizer_states(rule, config, half_model, kind))
    bytes += state.bytes();
  return bytes;
}

int64_t optimizer_state_bytes(const OptimizerConfig& config, bool half_model, UpdateKind kind) {
  return optimizer_state_bytes(update_rule(config), config, half_model, kind);
}

}  // namespace megatron
