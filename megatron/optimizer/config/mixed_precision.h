// Mixed precision: the type of the model, the loss scale, and steps with bad gradients.
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/base/fields.h"

namespace megatron {

struct MixedPrecisionConfig {
  bool fp16 = false, bf16 = false;
  std::optional<double> loss_scale;  // constant scale; default: dynamic for fp16
  double initial_loss_scale = 4294967296.0;
  double min_loss_scale = 1.0;
  double loss_scale_window = 1000.0;
  int64_t hysteresis = 2;
  bool check_for_nan_in_loss_and_grad = true;
  int64_t max_consecutive_bad_steps = 10;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;

  bool dynamic_loss_scale() const { return fp16 && !loss_scale; }
};

}  // namespace megatron
