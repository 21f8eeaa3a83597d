#include "megatron/models/common/routers.h"

#include "megatron/base/check.h"

namespace megatron {

Routers routers_of(const TransformerConfig& config) {
  Routers routers;
  routers.experts = config.num_experts;
  for (int64_t layer = 1; layer <= config.num_layers; ++layer)
    if (config.is_moe_layer(layer))
      routers.names.push_back(cat("decoder.layers.", layer - 1, ".mlp.router"));
  if (config.is_moe_layer(config.num_layers))
    for (int64_t depth = 0; depth < config.mtp_distinct_layers(); ++depth)
      routers.names.push_back(cat("mtp.layers.", depth, ".transformer_layer.mlp.router"));
  return routers;
}

}  // namespace megatron
