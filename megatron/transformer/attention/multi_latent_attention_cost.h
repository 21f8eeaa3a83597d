// What the half of a layer with multi-latent attention costs a rank. Letters as in
// transformer/layer/layer_cost.h; q and c are the ranks of the latents of queries and of keys with
// values, p and r the features of a key head that are as projected and that are rotated, v those of
// a value head.
//
// Saved (transformer/attention/multi_latent_attention.cc):
//   residual stream  R h x                       input of the norm
//   norms            R (h e + 4 k)               its output (not with layernorm recomputed) and
//                                                statistics
//   attention        R (q + c) e                 latents (q only with --q-lora-rank)
//                    + R (q + c) e + 2 R 4 k     with --qk-layernorm: outputs of their norms (not
//                                                with layernorm recomputed), statistics
//                    + T N (2 (p + r) + v) e     queries, keys, values (not with mla_up_proj
//                                                recomputed); of an all-to-all the exchanged ones
//                    + T N v e                   output
//                    and what core attention saves: core_attention_cost.h
//
// Sent over the tensor ranks: as by a row-parallel linear of h and by column-parallel ones whose
// inputs are q (or h) and c wide; and r, gathered with sequence parallelism, whose gradient is
// scattered, or without summed. Over the context ranks: core_attention_cost.h.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// As attention_cost().
SublayerCost multi_latent_attention_cost(const TransformerConfig& config, int64_t layer_number,
                                         const LayerShape& shape, bool offloaded);

}  // namespace megatron
