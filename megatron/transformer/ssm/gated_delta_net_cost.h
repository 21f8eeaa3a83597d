// What a gated delta net costs a rank. Letters as in transformer/layer/layer_cost.h; Hk heads of
// queries and keys of K, Hv heads of values of V, w = 2 Hk K + Hv V channels and Q rows of the
// convolution.
//
// Saved (gated_delta_core.h):
//   residual stream  R h x                        input of the norm
//   norms            R (h e + 4 k)                output (not with --recompute-modules layernorm)
//                                                 and statistics
//   mixer            T (w + Hv V + 2 Hv) e / t    output of in_proj
//                    T Hv V e / t                 y
//                    T Hv V e / t                 output of the norm and its gate (not with
//                                                 --recompute-modules gdn_norm_out)
//                    4 T Hv / t                   its statistics
//                    2 b (4 Hv K V + (Q-1) w e) / t
//                                                 states and rows before both segments, if c > 1
// The backward makes the output of the convolution and the states between chunks again. Sent over
// the tensor ranks: what the linears send; over the context ranks the matrices, states and rows of
// all segments, and their gradients.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// `offloaded`: the layer's saved activations go to host memory, of which those of this sublayer
// stay. Layers count from 1.
SublayerCost gated_delta_net_cost(const TransformerConfig& config, int64_t layer_number,
                                  const LayerShape& shape, bool offloaded);

}  // namespace megatron
