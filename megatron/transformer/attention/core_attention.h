// Core attention of one layer as its configuration says: scale, mask, dropout, and the exchange
// between the context-parallel ranks.
#pragma once

#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/attention/attention.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

// Keeps references to config and groups, which must outlive it.
class CoreAttention {
 public:
  // `heads`: query heads of this rank; tensor-parallel ranks hold consecutive ones. `layer_number`
  // counts from 1.
  CoreAttention(const TransformerConfig& config, int64_t layer_number, int64_t heads,
                const ParallelGroups& groups);

  //   q       [s, b, n, d]      k [s_k, b, g, d]      v [s_k, b, g, v]
  //   return  [s, b, n, v]
  //
  // Tokens see what the pass lets them see; with c context-parallel ranks s is the s/c tokens of
  // this rank (transformer/context_parallel/context_parallel.h), and the exchange is the only
  // communication.
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const LayerContext& context) const;

  // What forward() passes on, for callers of tensor/attention/attention.h.
  AttentionOptions options(const LayerContext& context, int64_t num_queries,
                           int64_t num_keys) const;

  // The options of attention over a cache. Throws Error when context-parallel ranks would share it.
  AttentionOptions cached(const LayerContext& context) const;

  // The context-parallel group of this micro-batch.
  const ProcessGroup& context_ranks(const ForwardContext& pass) const {
    return pass.cp != nullptr ? *pass.cp : parallel_.cp;
  }

 private:
  const TransformerConfig& config_;
  const ParallelGroups& parallel_;
  int64_t layer_number_;  // from 1
  int64_t first_head_;
  ContextParallelType context_parallel_type_;
  RandomKey dropout_key_;
};

}  // namespace megatron
