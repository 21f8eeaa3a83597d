// The routers of a model with layers of experts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct Routers {
  // Of their modules on all stages: those of the decoder, then of multi-token prediction.
  std::vector<std::string> names;
  int64_t experts = 0;  // of each
};
Routers routers_of(const TransformerConfig& config);

}  // namespace megatron
