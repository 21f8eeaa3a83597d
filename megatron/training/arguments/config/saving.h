// When a run writes checkpoints, which of them it keeps, and what they hold.
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/base/fields.h"

namespace megatron {

enum class SaveFailure { kStop, kContinue };

struct SavingConfig {
  std::optional<int64_t> save_interval, save_retain_interval, keep_last_checkpoints;
  bool async_save = false;
  SaveFailure save_failure = SaveFailure::kStop;
  bool save_frozen = true;  // false: checkpoints do not include frozen weights
  bool no_save_optim = false;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;
};

}  // namespace megatron
