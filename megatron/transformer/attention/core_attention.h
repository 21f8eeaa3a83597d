// Core attention of one layer as its configuration says: scale, mask, dropout, and the exchange
// between the context-parallel ranks.
#pragma once

#include <memory>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/module.h"
#include "megatron/tensor/attention/attention.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

// Parameters with --softmax-type learnable: softmax_offset [n], the sinks of the heads. Keeps
// references to config and groups, which must outlive it.
class CoreAttention : public Module {
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

  // What forward() passes on, for callers of tensor/attention/attention.h, once for each pass.
  // `queries`: their type and device.
  AttentionOptions options(const LayerContext& context, const at::TensorOptions& queries,
                           int64_t num_queries, int64_t num_keys) const;

  // The options of attention over a cache. Throws Error when context-parallel ranks would share it.
  AttentionOptions cached(const LayerContext& context, const at::TensorOptions& queries) const;

  // The rows within which tokens of this layer attend; null: samples have padding, or none.
  const std::shared_ptr<const UnpaddedRows>& unpadded_rows(const ForwardContext& pass) const;

  // The context-parallel group of this micro-batch.
  const ProcessGroup& context_ranks(const ForwardContext& pass) const {
    return pass.cp != nullptr ? *pass.cp : parallel_.cp;
  }

 private:
  // For queries like these; undefined: none.
  at::Tensor sinks(const at::TensorOptions& queries) const;

  const TransformerConfig& config_;
  const ParallelGroups& parallel_;
  int64_t layer_number_;  // from 1
  int64_t first_head_;
  ContextParallelType context_parallel_type_;
  RandomKey dropout_key_;
  int64_t heads_;
  std::unique_ptr<Parameter> softmax_offset_;  // null: none
};

}  // namespace megatron
