// What a layer of attention and a feed-forward sublayer costs a rank.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// As LayerCostFunction, for attention and the MLP.
LayerCost transformer_layer_cost(const TransformerConfig& config, int64_t layer_number,
                                 const LayerShape& shape, bool offloaded);

// The same with cross attention, which is a part of the first half. LayerShape::encoded says what
// it attends to.
LayerCost cross_attention_layer_cost(const TransformerConfig& config, int64_t layer_number,
                                     const LayerShape& shape, bool offloaded);

}  // namespace megatron
