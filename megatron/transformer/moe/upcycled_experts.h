// What experts that start as parts of a dense MLP take from its configuration
// (training/experts/upcycling.h has the rule).
#pragma once

#include <cstdint>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct UpcycledExperts {
  int64_t width = 0;        // of an expert's MLP
  bool gated = false;       // FC1 is [gate | up]
  double scale = 1.0;       // of FC1 and FC2
  int64_t router_seed = 0;  // of the new routers
};

UpcycledExperts upcycled_experts(const TransformerConfig& config, int64_t granularity);

}  // namespace megatron
