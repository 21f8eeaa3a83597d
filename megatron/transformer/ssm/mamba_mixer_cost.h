// What the Mamba-2 sublayer costs a rank. Letters as in transformer/layer/layer_cost.h; H heads of
// P channels, d = H P, N state, G groups, K width of the convolution, q = max(1, t / G) ranks that
// share a group.
//
// Saved (mamba_core.h):
//   residual stream  R h x                    input of the norm
//   norms            R (h e + 4 k)            output (not with --recompute-modules layernorm) and
//                                             statistics
//   mixer            T (2 d + 2 G N + H) e / t   output of in_proj
//                    T d e / t                y
//                    T d e / t                output of the gated norm (not with
//                                             --recompute-modules mamba_norm)
//                    4 T max(1, G / t)        its statistics
//                    2 T N e                  gathered B and C, if q > 1
//                    2 b (4 H P N + (K-1) (d + 2 G N) e) / t
//                                             states and rows before both segments, if c > 1
// With --recompute-modules mamba only the residual stream. The backward makes the output of the
// convolution and the states between chunks again. Sent over the tensor ranks: what the linears
// send, and if q > 1 B and C, sums of the norm, and their gradients; over the context ranks the
// states and rows of all segments, and their gradients.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// `offloaded`: the layer's saved activations go to host memory, of which those of this sublayer
// stay. Layers count from 1.
SublayerCost mamba_mixer_cost(const TransformerConfig& config, int64_t layer_number,
                              const LayerShape& shape, bool offloaded);

}  // namespace megatron
