// What a recurrent layer costs a rank. Letters as in transformer/layer/layer_cost.h.
//
// Saved by the recurrence, besides what its linears save, with n = T h/t e:
//   3 n  output of linear_in       n  gate           n  states
//   n    silu of the output gate   n  output, which linear_out saves too
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// As LayerCostFunction, for the recurrence and the MLP.
LayerCost recurrent_layer_cost(const TransformerConfig& config, int64_t layer_number,
                               const LayerShape& shape, bool offloaded);

}  // namespace megatron
