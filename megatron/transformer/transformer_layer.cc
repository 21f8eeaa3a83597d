#include "megatron/transformer/transformer_layer.h"

#include "megatron/nn/activation_offload.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

at::Tensor normed(const std::unique_ptr<Norm>& norm, const at::Tensor& y) {
  return norm ? norm->forward(y) : y;
}

}  // namespace

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
  const ForwardContext& pass = context.pass;
  if (pass.offload != nullptr) pass.offload->begin_group();
  const at::Tensor attention =
      normed(post_self_attn_layernorm_, self_attention_.forward(x, context));
  const at::Tensor middle = add_residual(attention, x, attention_output_key_, pass);
  if (pass.offload != nullptr) pass.offload->begin_group();
  OffloadedPass* offload = context.offload();
  if (config_.parallel_residual) {
    return add_residual(normed(post_mlp_layernorm_, mlp_.forward(x, offload)), middle,
                        mlp_output_key_, pass);
  }
  if (pass.tape == nullptr || !config_.recomputes("mlp"))
    return feed_forward(middle, pass, offload);
  RecomputeTape::Keeper keeper;
  if (offload != nullptr && config_.offloads("mlp_norm"))
    keeper = [offload](const at::Tensor& in) { return offload->keep(in); };
  // The residual belongs to what is recomputed, so that one tensor leads in and one out.
  return pass.tape->run(
      [this, pass](const at::Tensor& in) { return feed_forward(in, pass, nullptr); }, middle,
      keeper);
}

at::Tensor TransformerLayer::feed_forward(const at::Tensor& x, const ForwardContext& pass,
                                          OffloadedPass* offload) {
  return add_residual(normed(post_mlp_layernorm_, mlp_.forward(x, offload)), x, mlp_output_key_,
                      pass);
}

at::Tensor TransformerLayer::add_residual(const at::Tensor& branch, const at::Tensor& x,
                                          RandomKey key, const ForwardContext& pass) const {
  const Place& place = pass.rows.position.defined() ? pass.rows : pass.place;
  return dropout_add(branch, x, pass.training ? config_.hidden_dropout : 0.0, key, place);
}

}  // namespace megatron
