#include "megatron/transformer/transformer_layer.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

TransformerLayer::TransformerLayer(const TransformerConfig& config, int64_t layer_number,
                                   bool sequence_parallel, const ParallelGroups& groups,
                                   FeedForwardMaker make_feed_forward, Cross cross)
    : Layer(layer_number),
      config_(config),
      self_attention_(make_attention(config, layer_number, sequence_parallel, groups)),
      mlp_(make_feed_forward(config, layer_number, sequence_parallel, groups)),
      attention_half_(config, *self_attention_,
                      random_key(config.seed, "attention_output_dropout", layer_number),
                      sequence_parallel, /*names=*/{}),
      mlp_half_(config, *mlp_, random_key(config.seed, "mlp_output_dropout", layer_number),
                sequence_parallel, mlp_->names()) {
  if (Norm* norm = self_attention_->input_norm()) add("input_layernorm", norm);
  add("self_attention", self_attention_.get());
  if (cross != Cross::kNone) {
    MEGATRON_CHECK(!config.parallel_residual && !config.has_post_norm(),
                   "cross attention with --parallel-residual or with norms on the output of "
                   "branches is not built\nhint: --norm-placement pre");
    cross_attention_ =
        cross == Cross::kEncoded
            ? std::make_unique<CrossAttention>(config, layer_number, sequence_parallel, groups)
            : std::unique_ptr<CrossAttention>(std::make_unique<ChunkedCrossAttention>(
                  config, layer_number, sequence_parallel, groups));
    cross_part_ = std::make_unique<ResidualSublayer>(
        config, *cross_attention_,
        random_key(config.seed, "cross_attention_output_dropout", layer_number), sequence_parallel,
        SublayerNames{.joined = true});
    if (Norm* norm = cross_attention_->input_norm()) add("pre_cross_attn_layernorm", norm);
    add("cross_attention", cross_attention_.get());
  }
  if (Norm* norm = mlp_->input_norm()) add("pre_mlp_layernorm", norm);
  add("mlp", mlp_.get());
  if (Parameter* scale = attention_half_.scale()) add("attn_layer_scale", scale);
  if (Parameter* scale = mlp_half_.scale()) add("mlp_layer_scale", scale);
  if (!config.has_post_norm()) return;
  add("post_self_attn_layernorm", attention_half_.post_norm());
  add("post_mlp_layernorm", mlp_half_.post_norm());
}

std::unique_ptr<LayerState> TransformerLayer::make_state() const {
  if (cross_attention_ != nullptr) return cross_attention_->make_state();
  return self_attention_->make_state();
}

void TransformerLayer::keep_encoded(const at::Tensor& encoded, LayerState& state,
                                    const SequenceSlot& slot) {
  MEGATRON_ASSERT(cross_attention_ != nullptr, "a layer without cross attention");
  cross_attention_->keep(encoded, state, slot);
}

// Each part: norm, sublayer, residual.
at::Tensor TransformerLayer::forward(const at::Tensor& x, const LayerContext& context) {
  if (config_.parallel_residual) return forward_parallel_residual(x, context);
  const at::Tensor y = attend(x, context);
  return cross_part_ != nullptr ? read(y, context) : mlp_half_.forward(y, context);
}

at::Tensor TransformerLayer::attend(const at::Tensor& x, const LayerContext& context) {
  return attention_half_.forward(x, context);
}

at::Tensor TransformerLayer::read(const at::Tensor& x, const LayerContext& context) {
  return mlp_half_.forward(cross_part_->forward(x, context), context);
}

at::Tensor TransformerLayer::forward_parallel_residual(const at::Tensor& x,
                                                       const LayerContext& context) {
  const SublayerOutput attention = self_attention_->forward(x, context, /*add=*/false);
  const SublayerOutput mlp = mlp_->forward(attention.residual, context, /*add=*/false);
  const at::Tensor middle =
      attention_half_.add_residual({attention.output, mlp.residual}, context.pass);
  return mlp_half_.add_residual({mlp.output, middle}, context.pass);
}

}  // namespace megatron
