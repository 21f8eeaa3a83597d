#include "megatron/transformer/ssm/mamba_mixer.h"

#include <optional>

#include "megatron/nn/saved_tensors.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

int64_t in_proj_rows(const TransformerConfig& c) {
  return 2 * c.mamba_width(c) + 2 * c.mamba_states() + c.mamba_heads(c);
}

LinearOptions in_proj_options(const TransformerConfig& config, int64_t layer_number,
                              bool sequence_parallel) {
  const int64_t width = config.mamba_width(config), states = config.mamba_states();
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = false;
  options.init = config.weight_init(in_proj_rows(config), config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  options.parts = {width, width, states, states, config.mamba_heads(config)};
  options.input_norm = norms_inputs(config);
  options.norm = norm_options(config);
  options.recompute_norm = config.recomputes("layernorm");
  options.lora = lora_options(config, "in_proj");
  return options;
}

LinearOptions out_proj_options(const TransformerConfig& config, int64_t layer_number,
                               bool sequence_parallel) {
  LinearOptions options;
  options.quantization = config.quantization(layer_number);
  options.bias = false;
  options.init =
      config.weight_init(config.hidden_size, config.mamba_width(config), /*output=*/true);
  options.sequence_parallel = sequence_parallel;
  options.lora = lora_options(config, "out_proj");
  return options;
}

}  // namespace

MambaMixer::MambaMixer(const TransformerConfig& config, int64_t layer_number,
                       bool sequence_parallel, const ParallelGroups& groups)
    : config_(config),
      core_(config, groups),
      in_proj_("in_proj", config.hidden_size, in_proj_rows(config),
               in_proj_options(config, layer_number, sequence_parallel), groups),
      out_proj_("out_proj", config.mamba_width(config), config.hidden_size,
                out_proj_options(config, layer_number, sequence_parallel), groups) {
  MambaParameters& p = core_.parameters;
  add("in_proj", &in_proj_);
  add("conv1d_weight", &p.conv_weight);
  add("conv1d_bias", &p.conv_bias);
  add("dt_bias", &p.dt_bias);
  add("A_log", &p.A_log);
  add("D", &p.D);
  add("norm.weight", &p.norm);
  add("out_proj", &out_proj_);
}

SublayerOutput MambaMixer::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  const SublayerOutput projected = in_proj_.forward_with_residual(x);
  const at::Tensor& mixed = projected.output;
  at::Tensor o;
  std::optional<SavedTensorScope> saves_no_output;
  if (context.state != nullptr) {
    o = core_.decode(mixed, static_cast<MambaState&>(*context.state), context.pass.decoding->batch);
  } else {
    MambaOutput result = core_.forward(mixed, context.pass);
    o = std::move(result.o);
    if (config_.recomputes("mamba_norm"))
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
