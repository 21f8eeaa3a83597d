#include "megatron/transformer/ssm/mamba_mixer.h"

namespace megatron {
namespace {

std::vector<int64_t> in_proj_parts(const TransformerConfig& c) {
  const int64_t width = c.mamba_width(c), states = c.mamba_states();
  return {width, width, states, states, c.mamba_heads(c)};
}

}  // namespace

MambaMixer::MambaMixer(const TransformerConfig& config, int64_t layer_number,
                       bool sequence_parallel, const ParallelGroups& groups)
    : RecurrentSublayer(config, layer_number, sequence_parallel, groups, in_proj_parts(config),
                        config.mamba_width(config), "mamba_norm") {
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

}  // namespace megatron
