// What the attention half of a layer costs a rank. Letters as in transformer/layer/layer_cost.h.
//
// Saved (tensor_parallel/layers.cc, attention.cc, tensor/attention/attention.cc):
//   residual stream  R h x                  input of the norm
//   norms            R (h e + 4 k)          output (not with --recompute-modules layernorm) and
//                                           statistics
//   attention        T d e (N + 2 G)        output of linear_qkv: as a whole if attention uses
//                                           views of it, else only the values
//                    + T N d e              queries, if rotated, normed or regrouped
//                    + T G d e              keys, if rotated or normed
//                    + T d e (N + G) + 4 k T (N + G)
//                                           with --qk-layernorm: inputs and statistics of the norms
//                    + T N d e              output, which linear_proj saves too
//                    + 2 T N d e (+ T N d e)  with --attention-output-gate: gates among the output
//                                           of linear_qkv, the gated output (and gates, where they
//                                           are no view)
//                    + 4 T N                log-sum-exp of a library's kernel (not with
//                                           --recompute-modules core_attn)
//                    a2a                    T d e (N + 2 lcm(G, a)) of exchanged tokens instead of
//                                           queries, keys and values, and the output twice
//   document mask    b s^2                  bool, if attention takes a mask: documents, or the
//                                           padding of encoders, with one context rank or a2a
//
// Sent over the tensor ranks: what its linears send (layer_cost.h); with fewer KV groups than ranks
// the output of linear_qkv is gathered forward, and its gradient scattered backward, over the ranks
// that share a group. Over the context ranks: core_attention_cost.h.
#pragma once

#include "megatron/tensor/attention/attention.h"
#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// `offloaded`: the layer's saved activations go to host memory. Layers count from 1.
SublayerCost attention_cost(const TransformerConfig& config, int64_t layer_number,
                            const LayerShape& shape, bool offloaded);

}  // namespace megatron
