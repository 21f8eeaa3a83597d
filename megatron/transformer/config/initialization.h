// How weights are drawn, and the seed of every draw.
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/transformer/config/shape.h"

namespace megatron {

struct InitializationConfig {
  double init_method_std = 0.02;
  std::optional<double> embedding_init_method_std;
  bool init_method_xavier_uniform = false;
  int64_t seed = 1234;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;
};

}  // namespace megatron
