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
}

at::Tensor TransformerLayer::forward(const at::Tensor& x, const LayerContext& context) {
  const double p = context.pass.training ? config_.hidden_dropout : 0.0;
  const Place& place = context.pass.rows.position.defined() ? context.pass.rows : context.pass.place;
  const at::Tensor attention = self_attention_.forward(x, context);
  const at::Tensor middle = dropout_add(attention, x, p, attention_output_key_, place);
  const at::Tensor mlp = mlp_.forward(middle);
  return dropout_add(mlp, middle, p, mlp_output_key_, place);
}

}  // namespace megatron
