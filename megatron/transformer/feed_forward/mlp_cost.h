// What the MLP half of a layer costs a rank. Letters as in transformer/layer/layer_cost.h.
//
// Saved (tensor_parallel/layers.cc, tensor/activation.cc):
//   residual stream  R h x                  input of the norm
//   norms            R (h e + 4 k)          output (not with --recompute-modules layernorm) and
//                                           statistics
//   MLP              T F e / t + T f e / t  outputs of linear_fc1 and of the activation (the latter
//                                           not with --recompute-modules mlp_act)
// With --recompute-modules mlp only the residual stream. Sent over the tensor ranks: what its
// linears send (layer_cost.h), with --recompute-modules mlp in the forward twice.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// `offloaded`: the layer's saved activations go to host memory. Layers count from 1.
SublayerCost mlp_cost(const TransformerConfig& config, int64_t layer_number,
                      const LayerShape& shape, bool offloaded);

}  // namespace megatron
