// One transformer layer: x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x)));
// between them, in a decoder that reads an encoder's output or what was retrieved for its chunks,
// x = x + dropout(cross(norm(x))).
// --norm-placement puts norms on the outputs of the sublayers instead or in addition; with
// --parallel-residual both sublayers read x.
#pragma once

#include <memory>

#include "megatron/transformer/attention/attention_sublayer.h"
#include "megatron/transformer/attention/chunked_cross_attention.h"
#include "megatron/transformer/feed_forward/feed_forward.h"

namespace megatron {

// Parameters: input_layernorm.* and pre_mlp_layernorm.* (where no linear of the sublayer contains
// the norm of its input), self_attention..., mlp..., post_self_attn_layernorm.*,
// post_mlp_layernorm.* (post, sandwich); with LayerConfig::branch_scales attn_layer_scale,
// mlp_layer_scale; with cross attention pre_cross_attn_layernorm.*,
// cross_attention....
class TransformerLayer : public Layer {
 public:
  enum class Cross { kNone, kEncoded, kRetrieved };
  // Throws Error for cross attention with what is not built beside it.
  TransformerLayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                   const ParallelGroups& groups, FeedForwardMaker make_feed_forward,
                   Cross cross = Cross::kNone);
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override;
  std::unique_ptr<LayerState> make_state() const override;
  void keep_encoded(const at::Tensor& encoded, LayerState& state,
                    const SequenceSlot& slot) override;

  // With cross attention: forward() in two, for what reads the stream between them.
  at::Tensor attend(const at::Tensor& x, const LayerContext& context);
  at::Tensor read(const at::Tensor& x, const LayerContext& context);
  CrossAttention& cross_attention() { return *cross_attention_; }

 private:
  at::Tensor forward_parallel_residual(const at::Tensor& x, const LayerContext& context);

  const TransformerConfig& config_;
  std::unique_ptr<AttentionSublayer> self_attention_;
  std::unique_ptr<FeedForward> mlp_;
  ResidualSublayer attention_half_, mlp_half_;
  // Both null: none
  std::unique_ptr<CrossAttention> cross_attention_;
  std::unique_ptr<ResidualSublayer> cross_part_;
};

}  // namespace megatron
