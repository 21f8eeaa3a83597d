// When a run evaluates, and on how much.
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/base/fields.h"

namespace megatron {

struct EvaluationConfig {
  int64_t eval_iters = 100;
  std::optional<int64_t> eval_interval, start_eval_at_iter;
  std::optional<int64_t> eval_global_batch_size, eval_micro_batch_size;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;
};

}  // namespace megatron
