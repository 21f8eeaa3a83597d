// What the MLP of a layer computes.
#pragma once

#include <optional>

#include "megatron/transformer/config/shape.h"

namespace megatron {

struct FeedForwardConfig {
  bool swiglu = false;
  bool geglu = false;
  bool quick_geglu = false;
  bool quick_gelu = false;
  bool exact_geglu = false;
  bool relu = false;
  bool squared_relu = false;
  bool openai_gelu = false;
  // With biases: the tanh approximation, as Megatron's fused kernel computes
  bool bias_gelu_fusion = true;
  double glu_linear_offset = 0.0;
  // c, of gated experts: the gate is at most c, the other half within -c and c
  std::optional<double> activation_func_clamp_value;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;
};

}  // namespace megatron
