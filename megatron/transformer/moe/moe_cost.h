// What a layer of attention and experts costs a rank. Letters as in transformer/layer/layer_cost.h,
// and E experts, k choices of a token, f the width of one expert, F = 2f when gated, else f, h' the
// latent width or h, p y the sizes of the expert and expert-tensor axes.
//
// Rows of a rank's experts: r = l R k y at load l, 1 being balance; at most l = p min(k, E/p) / k.
//
// Saved (transformer/moe/):
//   residual stream  R h x        input of the norm
//   norms            R (h e + 4)  output and statistics
//   router           8 R E, R k (4 + 8)  logits and shares, choices and weights; sums of 4 bytes
//   experts          r h' e       rows, if they are exchanged; else they are gathered again
//                    r F e / y    outputs of linear_fc1
//                    r f e / y    of the activation, not with --recompute-modules moe_act
//   shared expert    as an MLP of its width (feed_forward/mlp_cost.h)
// With --recompute-modules moe only the residual stream and the choices.
//
// Sent, each way and in each pass: alltoall R k (1 - 1/p) (h' e + 4) over ep, and (y - 1) times the
// rows gathered and as many sums scattered over etp; allgather (p y - 1) R (h' e + 6 k) and as many
// fp32 sums.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// As LayerCostFunction, at balance.
LayerCost moe_layer_cost(const TransformerConfig& config, int64_t layer_number,
                         const LayerShape& shape, bool offloaded);

}  // namespace megatron
