// A model with experts that starts from the weights of a dense one.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"

namespace megatron {

struct UpcyclingConfig {
  bool moe_use_upcycling = false;
  int64_t moe_upcycling_granularity = 1;  // experts that the MLP of a layer is cut into

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;
};

}  // namespace megatron
