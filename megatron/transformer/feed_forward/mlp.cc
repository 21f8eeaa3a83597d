#include "megatron/transformer/feed_forward/mlp.h"

#include <optional>

#include "megatron/nn/activation_offload.h"
#include "megatron/nn/saved_tensors.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

int64_t fc1_rows(const TransformerConfig& config) {
  return config.ffn_hidden_size * (is_gated(config.activation()) ? 2 : 1);
}

LinearOptions fc1_options(const TransformerConfig& config, int64_t layer_number,
                          bool sequence_parallel) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = config.add_bias_linear;
  options.init = config.weight_init(fc1_rows(config), config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  if (is_gated(config.activation()))
    options.parts = {config.ffn_hidden_size, config.ffn_hidden_size};
  options.input_norm = norms_inputs(config);
  options.norm = norm_options(config);
  options.recompute_norm = config.recomputes("layernorm");
  options.lora = lora_options(config, "linear_fc1");
  return options;
}

// A quantised linear_fc2 takes the input of the activation: the activation's kernel measures the
// amax and quantises, and the quantised values are saved instead of the activation's output.
bool is_activation_inside(const TransformerConfig& config, int64_t layer_number) {
  return config.recomputes("mlp_act") || config.quantization(layer_number).enabled() ||
         is_gelu_in_product(config, layer_number);
}

LinearOptions fc2_options(const TransformerConfig& config, int64_t layer_number,
                          bool sequence_parallel, ColumnParallelLinear* fc1) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = config.add_bias_linear;
  options.init = config.weight_init(config.hidden_size, config.ffn_hidden_size, /*output=*/true);
  options.sequence_parallel = sequence_parallel;
  if (is_activation_inside(config, layer_number)) {
    options.input_activation = config.activation();
    options.activation_offset = config.glu_linear_offset;
    options.recompute_activation = config.recomputes("mlp_act");
    options.input_from = fc1;
  }
  options.lora = lora_options(config, "linear_fc2");
  return options;
}

}  // namespace

bool is_gelu_in_product(const TransformerConfig& config, int64_t layer_number) {
  return config.activation() == Activation::kGeluTanh &&
         !config.quantization(layer_number).enabled() &&
         lora_options(config, "linear_fc2").rank == 0;
}

MLP::MLP(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
         const ParallelGroups& groups, const MlpPart& part)
    : config_(config),
      part_(part),
      activation_inside_(is_activation_inside(config, layer_number)),
      linear_fc1_("linear_fc1", config.hidden_size, fc1_rows(config),
                  fc1_options(config, layer_number, sequence_parallel), groups),
      linear_fc2_("linear_fc2", config.ffn_hidden_size, config.hidden_size,
                  fc2_options(config, layer_number, sequence_parallel, &linear_fc1_), groups) {
  add("linear_fc1", &linear_fc1_);
  add("linear_fc2", &linear_fc2_);
}

SublayerOutput MLP::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  if (config_.activation() == Activation::kSwiglu && config_.glu_linear_offset == 0.0) {
    if (const std::optional<SublayerOutput> fused = linear_fc1_.forward_swiglu(x)) {
      if (add) return {linear_fc2_.forward_activated(fused->output, fused->residual), {}};
      return {linear_fc2_.forward_activated(fused->output), fused->residual};
    }
  }
  OffloadedPass* offload = context.offload();
  SublayerOutput result;
  SavedTensorScope::Restore input;
  {
    const OffloadScope scope(offload, [&](const at::Tensor& saved) {
      return config_.offloads(saved.is_alias_of(x) ? part_.input : "mlp_fc1");
    });
    result = linear_fc1_.forward_with_residual(x);
    if (part_.recompute_fc1) input = keep_saved(x);
  }
  at::Tensor& hidden = result.output;
  std::optional<SavedTensorScope> saves_no_fc1;
  if (part_.recompute_fc1)
    saves_no_fc1.emplace(
        /*recomputing=*/true,
        [fc1 = hidden.detach(), again = recomputed([this, x = std::move(input)] {
                                  return linear_fc1_.forward(x());
                                })](const at::Tensor& saved) {
          return saved.is_alias_of(fc1) ? again : SavedTensorScope::Restore();
        });
  if (!activation_inside_) {
    const OffloadScope scope(offload,
                             [&](const at::Tensor&) { return config_.offloads("mlp_act"); });
    hidden = activate(hidden, config_.activation(), config_.glu_linear_offset);
  }
  const OffloadScope scope(
      offload, [this, before = hidden.const_data_ptr()](const at::Tensor& saved) {
        return config_.offloads(activation_inside_ && saved.const_data_ptr() == before ? "mlp_act"
                                                                                       : "mlp_fc2");
      });
  if (add) return {linear_fc2_.forward(std::move(hidden), result.residual), {}};
  hidden = linear_fc2_.forward(std::move(hidden));
  return result;
}

}  // namespace megatron
