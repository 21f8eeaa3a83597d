// The states that the optimizer keeps for each weight: their types, and where they are.
#pragma once

#include "megatron/base/fields.h"

namespace megatron {

// Element type of a state of the optimizer.
enum class StateType { kFp32, kBf16 };

struct StatesConfig {
  bool use_precision_aware_optimizer = false;
  StateType main_params_dtype = StateType::kFp32, main_grads_dtype = StateType::kFp32;
  StateType exp_avg_dtype = StateType::kFp32, exp_avg_sq_dtype = StateType::kFp32;
  bool optimizer_cpu_offload = false;
  // Fraction of the elements that is offloaded, rounded up to whole parameters
  double optimizer_offload_fraction = 1.0;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;
};

}  // namespace megatron
