#include "megatron/transformer/transformer_layer_cost.h"

#include "megatron/transformer/attention/attention_cost.h"
#include "megatron/transformer/attention/cross_attention_cost.h"
#include "megatron/transformer/feed_forward/mlp_cost.h"

namespace megatron {

LayerCost transformer_layer_cost(const TransformerConfig& config, int64_t layer_number,
                                 const LayerShape& shape, bool offloaded) {
  LayerCost cost;
  cost.first = attention_cost(config, layer_number, shape, offloaded);
  cost.second = mlp_cost(config, layer_number, shape, offloaded);
  cost.stream = cost.first.saved.residual;
  cost.not_reloaded = cost.first.offloaded.given.total() - cost.first.offloaded.taken;
  return cost;
}

LayerCost cross_attention_layer_cost(const TransformerConfig& config, int64_t layer_number,
                                     const LayerShape& shape, bool offloaded) {
  LayerCost cost = transformer_layer_cost(config, layer_number, shape, offloaded);
  cost.first.append(cross_attention_cost(config, layer_number, shape, offloaded), cost.stream);
  return cost;
}

}  // namespace megatron
