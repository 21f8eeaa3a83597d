// One transformer layer: x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x)));
// --norm-placement puts norms on the outputs of the sublayers instead or in addition; with
// --parallel-residual both sublayers read x.
#pragma once

#include "megatron/transformer/attention/attention.h"
#include "megatron/transformer/feed_forward/mlp.h"

namespace megatron {

// Parameters: self_attention..., mlp..., post_self_attn_layernorm.*, post_mlp_layernorm.* (post,
// sandwich).
//
//   x, return   [s, b, h]   (s/t with sequence parallelism), in fp32 with fp32_residual_connection
class TransformerLayer : public Layer {
 public:
  // `layer_number` is global and counts from 1.
  TransformerLayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                   const ParallelGroups& groups);
  // With a tape in the context and --recompute-modules mlp, the MLP half is recomputed in the
  // backward.
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override;
  std::unique_ptr<LayerState> make_state(const DecodingShape& shape) const override;

 private:
  // The MLP half: x + dropout(mlp(norm(x))).
  at::Tensor feed_forward(const at::Tensor& x, const ForwardContext& pass, OffloadedPass* offload);
  // Whether the last GEMM of a sublayer adds the residual itself: true if neither dropout nor a
  // norm comes in between.
  bool adds_in_product(const ForwardContext& pass) const;
  // Residual + dropout(post_norm(output)) of a sublayer; post_norm may be null. If the residual is
  // undefined, the output already contains it.
  at::Tensor add_residual(const SublayerOutput& branch, Norm* post_norm, RandomKey key,
                          const ForwardContext& pass) const;

  const TransformerConfig& config_;
  RandomKey attention_output_key_, mlp_output_key_;
  SelfAttention self_attention_;
  MLP mlp_;
  std::unique_ptr<Norm> post_self_attn_layernorm_, post_mlp_layernorm_;
};

}  // namespace megatron
