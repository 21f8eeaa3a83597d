#include "megatron/transformer/transformer_layer.h"

#include "megatron/tensor/torch.h"

namespace megatron {

TransformerLayer::TransformerLayer(const TransformerConfig& config, int64_t layer_number,
                                   bool sequence_parallel, const ParallelGroups& groups)
    : config_(config),
      attention_output_key_(random_key(config.seed, "attention_output_dropout", layer_number)),
      mlp_output_key_(random_key(config.seed, "mlp_output_dropout", layer_number)),
      self_attention_(config, layer_number, sequence_parallel, groups),
      mlp_(config, sequence_parallel, groups) {
  add("self_attention", &self_attention_);
  add("mlp", &mlp_);
  if (!config.has_post_norm()) return;
  const NormOptions norm{config.normalization, config.layernorm_epsilon,
                         config.layernorm_zero_centered_gamma, sequence_parallel};
  post_self_attn_layernorm_ = std::make_unique<Norm>(config.hidden_size, norm);
  post_mlp_layernorm_ = std::make_unique<Norm>(config.hidden_size, norm);
  add("post_self_attn_layernorm", post_self_attn_layernorm_.get());
  add("post_mlp_layernorm", post_mlp_layernorm_.get());
}

at::Tensor TransformerLayer::forward(const at::Tensor& x, const LayerContext& context) {
  const double p = context.pass.training ? config_.hidden_dropout : 0.0;
  const Place& place = context.pass.rows.position.defined() ? context.pass.rows : context.pass.place;
  const auto normed = [](const std::unique_ptr<Norm>& norm, const at::Tensor& y) {
    return norm ? norm->forward(y) : y;
  };
  const at::Tensor attention =
      normed(post_self_attn_layernorm_, self_attention_.forward(x, context));
  const at::Tensor middle = dropout_add(attention, x, p, attention_output_key_, place);
  const at::Tensor mlp =
      normed(post_mlp_layernorm_, mlp_.forward(config_.parallel_residual ? x : middle));
  return dropout_add(mlp, middle, p, mlp_output_key_, place);
}

}  // namespace megatron
