// One transformer layer: x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x)));
// with norms of the branches' outputs (--norm-placement), or with both branches reading x
// (--parallel-residual).
#pragma once

#include "megatron/transformer/attention/attention.h"
#include "megatron/transformer/feed_forward/mlp.h"

namespace megatron {

// Parameters: self_attention..., mlp..., post_self_attn_layernorm.*, post_mlp_layernorm.* (post,
// sandwich).
//
//   x, return   [s, b, h]   (s/t with sequence parallelism), in fp32 with fp32_residual_connection
class TransformerLayer : public Module {
 public:
  // `layer_number` is global and counts from 1.
  TransformerLayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                   const ParallelGroups& groups);
  // With a tape in the context and --recompute-modules mlp, the second half is recomputed in the
  // backward.
  at::Tensor forward(const at::Tensor& x, const LayerContext& context);

 private:
  // The second half: x + dropout(mlp(norm(x))).
  at::Tensor feed_forward(const at::Tensor& x, const ForwardContext& pass, OffloadedPass* offload);
  // Whether nothing comes between a sublayer's last product and the residual, which it then adds.
  bool adds_in_product(const ForwardContext& pass) const;
  // result.residual + dropout(result.output), with post_norm applied to the output first unless it
  // is null. An undefined residual: the sublayer has added it.
  at::Tensor add_residual(const SublayerOutput& result, Norm* post_norm, RandomKey key,
                          const ForwardContext& pass) const;

  const TransformerConfig& config_;
  RandomKey attention_output_key_, mlp_output_key_;
  SelfAttention self_attention_;
  MLP mlp_;
  std::unique_ptr<Norm> post_self_attn_layernorm_, post_mlp_layernorm_;
};

}  // namespace megatron
