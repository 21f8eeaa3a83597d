// The first sublayer of a transformer layer: self attention, or multi-latent attention.
#pragma once

#include "megatron/transformer/layer/sublayer.h"

namespace megatron {

class AttentionSublayer : public Sublayer {};

// Self attention, or what the configuration puts in its place. `layer_number` is global and counts
// from 1. Config and groups must outlive it.
std::unique_ptr<AttentionSublayer> make_attention(const TransformerConfig& config,
                                                  int64_t layer_number, bool sequence_parallel,
                                                  const ParallelGroups& groups);

// -- for its kinds

// Options of linear_proj, which maps the outputs of all heads back to the residual stream.
LinearOptions linear_proj_options(const TransformerConfig& config, int64_t layer_number,
                                  bool sequence_parallel);

// `count` of something on each of `ranks` tensor-parallel ranks. Throws Error if it does not
// divide.
int64_t per_rank(const char* what, int64_t count, int ranks);

inline bool is_alias(const at::Tensor& a, const at::Tensor& b) {
  return b.defined() && a.is_alias_of(b);
}

}  // namespace megatron
