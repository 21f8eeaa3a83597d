#include "megatron/transformer/transformer_layer.h"

#include "megatron/nn/activation_offload.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"

namespace megatron {

TransformerLayer::TransformerLayer(const TransformerConfig& config, int64_t layer_number,
                                   bool sequence_parallel, const ParallelGroups& groups)
    : Layer(layer_number),
      config_(config),
      attention_output_key_(random_key(config.seed, "attention_output_dropout", layer_number)),
      mlp_output_key_(random_key(config.seed, "mlp_output_dropout", layer_number)),
      self_attention_(config, layer_number, sequence_parallel, groups),
      mlp_(config, layer_number, sequence_parallel, groups) {
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

std::unique_ptr<LayerState> TransformerLayer::make_state(const DecodingShape& shape) const {
  return self_attention_.make_state(shape);
}

at::Tensor TransformerLayer::forward(const at::Tensor& x, const LayerContext& context) {
  const ForwardContext& pass = context.pass;
  if (pass.offload != nullptr) pass.offload->begin_group();
  if (config_.parallel_residual) {
    const SublayerOutput attention = self_attention_.forward(x, context);
    if (pass.offload != nullptr) pass.offload->begin_group();
    const SublayerOutput mlp = mlp_.forward(attention.residual, context.offload());
    const at::Tensor middle =
        add_residual({attention.output, mlp.residual}, nullptr, attention_output_key_, pass);
    return add_residual({mlp.output, middle}, nullptr, mlp_output_key_, pass);
  }
  const at::Tensor middle =
      add_residual(self_attention_.forward(x, context, adds_in_product(pass)),
                   post_self_attn_layernorm_.get(), attention_output_key_, pass);
  if (pass.offload != nullptr) pass.offload->begin_group();
  OffloadedPass* offload = context.offload();
  if (pass.tape == nullptr || !config_.recomputes("mlp"))
    return feed_forward(middle, pass, offload);
  RecomputeTape::Keeper keeper;
  if (offload != nullptr && config_.offloads("mlp_norm"))
    keeper = [offload](const at::Tensor& in) { return offload->keep(in); };
  // The residual add is part of the recomputed function, which thus has one input and one output
  // tensor.
  return pass.tape->run(
      [this, pass](const at::Tensor& in) { return feed_forward(in, pass, nullptr); }, middle,
      keeper);
}

at::Tensor TransformerLayer::feed_forward(const at::Tensor& x, const ForwardContext& pass,
                                          OffloadedPass* offload) {
  return add_residual(mlp_.forward(x, offload, adds_in_product(pass)), post_mlp_layernorm_.get(),
                      mlp_output_key_, pass);
}

bool TransformerLayer::adds_in_product(const ForwardContext& pass) const {
  return !config_.has_post_norm() && !config_.fp32_residual_connection &&
         !(pass.training && config_.hidden_dropout > 0.0);
}

at::Tensor TransformerLayer::add_residual(const SublayerOutput& result, Norm* post_norm,
                                          RandomKey key, const ForwardContext& pass) const {
  if (!result.residual.defined()) return result.output;
  const TokenPositions& place = pass.rows.position.defined() ? pass.rows : pass.place;
  const double p = pass.training ? config_.hidden_dropout : 0.0;
  return dropout_add(post_norm != nullptr ? post_norm->forward(result.output) : result.output,
                     result.residual, p, key, place);
}

}  // namespace megatron
