#include "megatron/transformer/ssm/gated_delta_net.h"

namespace megatron {
namespace {

std::vector<int64_t> delta_in_proj_parts(const TransformerConfig& c) {
  return {c.linear_key_width(),   c.linear_key_width(),     c.linear_value_width(),
          c.linear_value_width(), c.linear_num_value_heads, c.linear_num_value_heads};
}

}  // namespace

GatedDeltaNet::GatedDeltaNet(const TransformerConfig& config, int64_t layer_number,
                             bool sequence_parallel, const ParallelGroups& groups)
    : RecurrentSublayer(config, layer_number, sequence_parallel, groups,
                        delta_in_proj_parts(config), config.linear_value_width(), "gdn_norm_out") {
  GatedDeltaParameters& p = core_.parameters;
  add("in_proj", &in_proj_);
  add("conv1d.weight", &p.conv_weight);
  add("dt_bias", &p.dt_bias);
  add("A_log", &p.A_log);
  add("out_norm.weight", &p.norm);
  add("out_proj", &out_proj_);
}

}  // namespace megatron
