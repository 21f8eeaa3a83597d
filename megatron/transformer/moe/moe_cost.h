// What a layer of attention and experts costs a rank. Letters as in transformer/layer/layer_cost.h,
// and E experts, k choices of a token, f the width of one expert, F = 2f when gated, else f, h' the
// latent width or h, p y the sizes of the expert and expert-tensor axes.
//
// Rows of a rank's experts: r = l R k y at load l, 1 being balance; at most l = p min(k, E/p) / k.
// With --moe-expert-rank-capacity-factor F at most r' = F R k y at a time, in rounds; else r' = r.
//
// Saved (transformer/moe/):
//   residual stream  R h x        input of the norm
//   norms            R (h e + 4)  output and statistics
//   router           8 R E, 26 R k + 37 r'  logits and shares, choices and weights; the latter of
//                                 rows that are exchanged
//   experts          r' h' e      rows, if they are exchanged; else they are gathered again
//                    r' F e / y   outputs of linear_fc1
//                    r' f e / y   of the activation, not with --recompute-modules moe_act
//   latents          R h' e       input of fc2_latent_proj; and again, that of the experts, if
//                                 their rows are not kept
//   shared expert    as an MLP of its width (feed_forward/mlp_cost.h); with a gate R h e + 8 R
// With --recompute-modules moe only the residual stream and the choices.
//
// Temporaries: forward r' h' e of outputs next to what is saved; backward twice that and r' (F + f)
// e / y of gradients; and rows in the order in which they are sent or arrive.
//
// Sent in each pass: alltoall R k (1 - 1/p) (h' e + 4) over ep and (1 - 1/p) r/y h' e back, over
// etp (y - 1) times the rows gathered and as many sums scattered; allgather (p y - 1) R (h' e + 6
// k) and as many fp32 sums. Rounds after the first are exchanged again in the backward.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// Rows of the experts of one rank for one micro-batch.
struct RankExpertRows {
  int64_t sent = 0;  // of its own tokens: R k, without what a capacity drops
  int64_t all = 0;   // r
  int64_t held = 0;  // r'
  int64_t rounds = 1;
};
// At LayerShape::expert_load.
RankExpertRows rank_expert_rows(const TransformerConfig& config, const LayerShape& shape);

// The load of a rank whose experts every token chooses.
double worst_expert_load(const TransformerConfig& config, int64_t expert_ranks);

// As LayerCostFunction, at LayerShape::expert_load.
// Memory of a rank in which rows arrive with --moe-token-dispatcher-type flex, for all layers; 0:
// none.
int64_t flex_memory_bytes(const TransformerConfig& config, const LayerShape& shape);

// Of experts alone, also in a model without attention.
SublayerCost experts_cost(const TransformerConfig& config, int64_t layer_number,
                          const LayerShape& shape, bool offloaded);
LayerCost moe_layer_cost(const TransformerConfig& config, int64_t layer_number,
                         const LayerShape& shape, bool offloaded);

}  // namespace megatron
