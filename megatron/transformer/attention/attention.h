// Self attention: norm, query/key/value projection, core attention, output projection.
#pragma once

#include <memory>

#include "megatron/tensor/attention/paged_attention.h"
#include "megatron/transformer/attention/attention_sublayer.h"
#include "megatron/transformer/attention/core_attention.h"
#include "megatron/transformer/attention/qk_norm.h"

namespace megatron {

// Parameters: linear_qkv.{layer_norm_weight, layer_norm_bias, weight, bias}, q_layernorm.weight,
// k_layernorm.weight ([d], or [heads * d] with --qk-layernorm-over-heads),
// core_attention.softmax_offset (--softmax-type learnable), linear_proj.{weight, bias}. Rows of
// linear_qkv are stored per key/value group, as in Megatron: [its query heads | key | value], with
// --attention-output-gate [its query heads | their gates | key | value].
//
// With c context-parallel ranks s is the s/c tokens of this rank, see
// transformer/context_parallel/context_parallel.h.
//
// Communication: that of its linears over tp, of attention over cp. Keeps a reference to groups,
// which must outlive it.
class SelfAttention : public AttentionSublayer {
 public:
  SelfAttention(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                const ParallelGroups& groups);
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;
  // Keys and values of earlier positions: a KVCache.
  std::unique_ptr<LayerState> make_state() const override;

 private:
  // Output of linear_qkv, gathered from the ranks that share one key/value group.
  SublayerOutput project(const at::Tensor& x, OffloadedPass* offload, at::Tensor* input);
  // The part of this rank of the gathered heads of queries or gates.
  at::Tensor own_heads(const at::Tensor& heads) const;
  PackedHeads packed_heads() const { return {groups_, heads_ / groups_, config_.kv_channels}; }
  // Core attention on views of the fused QKV tensor, without copying queries, keys and values.
  at::Tensor attend_packed(const at::Tensor& mixed, const LayerContext& context) const;
  // Decoding: attention over the cache on views of the fused QKV tensor [t, 1, ...], which rotates
  // them.
  at::Tensor decode(const at::Tensor& mixed, const RotaryTables& rotary,
                    const LayerContext& context);
  at::Tensor attend_cached(const AddedRows& added, const LayerContext& context) const;
  SublayerOutput project_back(const at::Tensor& y, const at::Tensor& x, bool add,
                              OffloadedPass* offload);

  const TransformerConfig& config_;
  int64_t layer_number_;    // from 1
  int64_t heads_, groups_;  // on this rank
  const ProcessGroup& kv_;  // ranks that share one key/value group
  CoreAttention core_;
  ColumnParallelLinear linear_qkv_;
  std::unique_ptr<QKNorm> q_layernorm_, k_layernorm_;
  RowParallelLinear linear_proj_;
};

}  // namespace megatron
