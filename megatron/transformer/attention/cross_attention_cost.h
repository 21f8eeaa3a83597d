// What the cross attention of a layer costs a rank. Letters as in transformer/layer/layer_cost.h,
// M the tokens of an encoder's output on this rank.
//
// Saved (cross_attention.cc):
//   residual stream  R h x                  input of the norm
//   norms            R (h e + 4 k)          its output and statistics
//   attention        d e N (2 T + 2 c M)    queries, keys and values, the input of linear_proj
//                    M h                    in FP8: the encoder's output, quantised by linear_kv
//
// The encoder's output, which all layers read, and its gradient are counted by the model.
//
// Sent over the tensor ranks: what its linears send; linear_kv that of M rows. Over the context
// ranks, with K = bytes of the keys and values of M tokens, W the same in fp32: (c-1) K forward,
// (c-1) W backward.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// Layers count from 1. shape.encoded is M.
SublayerCost cross_attention_cost(const TransformerConfig& config, int64_t layer_number,
                                  const LayerShape& shape, bool offloaded);

}  // namespace megatron
