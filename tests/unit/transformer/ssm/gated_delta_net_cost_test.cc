// The plan of a gated delta net: bytes that it saves and sends, operations.
#include "megatron/transformer/ssm/gated_delta_net_cost.h"

#include "megatron/transformer/ssm/gated_delta_net.h"
#include "tests/unit/transformer/ssm/mixer_cost_cases.h"

namespace megatron {
namespace {

TransformerConfig measured_delta_config() {
  TransformerConfig config;
  config.num_layers = 1;
  config.layer_pattern = "G";
  config.hidden_size = 8;
  config.num_attention_heads = 1;
  config.seq_length = 16;
  config.linear_num_key_heads = 4;
  config.linear_num_value_heads = 8;
  config.linear_key_head_dim = 3;
  config.linear_value_head_dim = 5;
  config.normalization = Normalization::kRMSNorm;
  config.finalize();
  return config;
}

TEST(GatedDeltaNetCost, SavesWhatThePlanSays) {
  expect_planned_saved_bytes<GatedDeltaNet>(measured_delta_config(), {"gdn_norm_out", "layernorm"},
                                            gated_delta_net_cost);
}

TEST(GatedDeltaNetCost, SendsWhatThePlanSays) {
  expect_planned_sent_bytes<GatedDeltaNet>(measured_delta_config(), gated_delta_net_cost, "");
}

// 2 T (h (2 qk + 2 v + 2 Hv) + Q (2 qk + v) + 4 Hv V^2 + h v)
TEST(GatedDeltaNetCost, Operations) {
  TransformerConfig config = measured_delta_config();
  config.hidden_size = 4096;
  config.linear_num_key_heads = 16;
  config.linear_num_value_heads = 32;
  config.linear_key_head_dim = config.linear_value_head_dim = 128;
  const SublayerCost cost = gated_delta_net_cost(config, 1, mixer_shape(8192, 1, 1), false);
  constexpr double h = 4096, qk = 2048, v = 4096, Hv = 32, V = 128;
  EXPECT_EQ(cost.weight_products() + cost.score_products,
            h * (2 * qk + 2 * v + 2 * Hv) + 4 * (2 * qk + v) + 4 * Hv * V * V + h * v);
}

}  // namespace
}  // namespace megatron
