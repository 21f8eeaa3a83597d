#include "megatron/transformer/mlp.h"

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

int64_t fc1_rows(const TransformerConfig& config) {
  return config.ffn_hidden_size * (is_gated(config.activation()) ? 2 : 1);
}

LinearOptions fc1_options(const TransformerConfig& config, bool sequence_parallel) {
  LinearOptions options;
  options.bias = config.add_bias_linear;
  options.init = config.weight_init(fc1_rows(config), config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  if (is_gated(config.activation()))
    options.parts = {config.ffn_hidden_size, config.ffn_hidden_size};
  options.input_norm = config.has_pre_norm();
  options.norm = {config.normalization, config.layernorm_epsilon,
                  config.layernorm_zero_centered_gamma};
  options.recompute_norm = config.recomputes("layernorm");
  return options;
}

LinearOptions fc2_options(const TransformerConfig& config, bool sequence_parallel) {
  LinearOptions options;
  options.bias = config.add_bias_linear;
  options.init = config.weight_init(config.hidden_size, config.ffn_hidden_size, /*output=*/true);
  options.sequence_parallel = sequence_parallel;
  return options;
}

}  // namespace

MLP::MLP(const TransformerConfig& config, bool sequence_parallel, const ParallelGroups& groups)
    : config_(config),
      linear_fc1_("linear_fc1", config.hidden_size, fc1_rows(config),
                  fc1_options(config, sequence_parallel), groups),
      linear_fc2_("linear_fc2", config.ffn_hidden_size, config.hidden_size,
                  fc2_options(config, sequence_parallel), groups) {
  add("linear_fc1", &linear_fc1_);
  add("linear_fc2", &linear_fc2_);
}

at::Tensor MLP::forward(const at::Tensor& x) {
  const at::Tensor hidden = linear_fc1_.forward(x);
  return linear_fc2_.forward(activate(hidden, config_.activation(), config_.glu_linear_offset));
}

}  // namespace megatron
