#include "megatron/transformer/ssm/gated_delta_net.h"

#include <numeric>
#include <optional>

#include "megatron/nn/saved_tensors.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

std::vector<int64_t> delta_in_proj_parts(const TransformerConfig& c) {
  return {c.linear_key_width(),   c.linear_key_width(),     c.linear_value_width(),
          c.linear_value_width(), c.linear_num_value_heads, c.linear_num_value_heads};
}

int64_t delta_in_proj_rows(const TransformerConfig& c) {
  const std::vector<int64_t> parts = delta_in_proj_parts(c);
  return std::accumulate(parts.begin(), parts.end(), int64_t{0});
}

LinearOptions delta_in_proj_options(const TransformerConfig& config, int64_t layer_number,
                                    bool sequence_parallel) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = false;
  options.init = config.weight_init(delta_in_proj_rows(config), config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  options.parts = delta_in_proj_parts(config);
  options.input_norm = norms_inputs(config);
  options.norm = norm_options(config);
  options.recompute_norm = config.recomputes("layernorm");
  options.lora = lora_options(config, "in_proj");
  return options;
}

LinearOptions delta_out_proj_options(const TransformerConfig& config, int64_t layer_number,
                                     bool sequence_parallel) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = false;
  options.init =
      config.weight_init(config.hidden_size, config.linear_value_width(), /*output=*/true);
  options.sequence_parallel = sequence_parallel;
  options.lora = lora_options(config, "out_proj");
  return options;
}

}  // namespace

GatedDeltaNet::GatedDeltaNet(const TransformerConfig& config, int64_t layer_number,
                             bool sequence_parallel, const ParallelGroups& groups)
    : config_(config),
      core_(config, groups),
      in_proj_("in_proj", config.hidden_size, delta_in_proj_rows(config),
               delta_in_proj_options(config, layer_number, sequence_parallel), groups),
      out_proj_("out_proj", config.linear_value_width(), config.hidden_size,
                delta_out_proj_options(config, layer_number, sequence_parallel), groups) {
  GatedDeltaParameters& p = core_.parameters;
  add("in_proj", &in_proj_);
  add("conv1d.weight", &p.conv_weight);
  add("dt_bias", &p.dt_bias);
  add("A_log", &p.A_log);
  add("out_norm.weight", &p.norm);
  add("out_proj", &out_proj_);
}

SublayerOutput GatedDeltaNet::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  const SublayerOutput projected = in_proj_.forward_with_residual(x);
  const at::Tensor& mixed = projected.output;
  at::Tensor o;
  std::optional<SavedTensorScope> saves_no_output;
  if (context.state != nullptr) {
    o = core_.decode(mixed, static_cast<GatedDeltaState&>(*context.state),
                     context.pass.decoding->batch);
  } else {
    GatedDeltaOutput result = core_.forward(mixed, context.pass);
    o = std::move(result.o);
    if (config_.recomputes("gdn_norm_out"))
      saves_no_output.emplace(
          /*recomputing=*/true,
          [saved = o.detach(),
           again = recomputed([this, mixed = mixed.detach(), y = result.y, rstd = result.rstd] {
             return core_.norm_again(mixed, y, rstd);
           })](const at::Tensor& tensor) {
            return tensor.is_alias_of(saved) ? again : SavedTensorScope::Restore();
          });
  }
  if (add) return {out_proj_.forward(std::move(o), projected.residual), {}};
  return {out_proj_.forward(std::move(o)), projected.residual};
}

}  // namespace megatron
