// The plan of a Mamba-2 sublayer: bytes that it saves and sends, operations.
#include "megatron/transformer/ssm/mamba_mixer_cost.h"

#include "megatron/transformer/ssm/mamba_mixer.h"
#include "tests/unit/transformer/ssm/mixer_config.h"
#include "tests/unit/transformer/ssm/mixer_cost_cases.h"

namespace megatron {
namespace {

TEST(MambaMixerCost, SavesWhatThePlanSays) {
  expect_planned_saved_bytes<MambaMixer>(mixer_config(8, 2), {"mamba_norm", "layernorm"},
                                         mamba_mixer_cost);
}

TEST(MambaMixerCost, SendsWhatThePlanSays) {
  for (const int64_t groups : {1, 2, 8})
    expect_planned_sent_bytes<MambaMixer>(mixer_config(8, groups), mamba_mixer_cost,
                                          cat(groups, " groups, "));
}

// 8192 tokens of one layer: 2 T h (2 d + 2 G N + H) + 7 T d N + 2 T d h
TEST(MambaMixerCost, Operations) {
  TransformerConfig config = mixer_config(64, 8);
  config.hidden_size = 2688;
  config.mamba_head_dim = 64;
  config.mamba_state_dim = 128;
  const SublayerCost cost = mamba_mixer_cost(config, 1, mixer_shape(8192, 1, 1), false);
  constexpr double T = 8192, h = 2688, d = 4096, GN = 1024, H = 64, N = 128;
  EXPECT_EQ(2 * T * (cost.weight_products() + cost.score_products),
            2 * T * h * (2 * d + 2 * GN + H) + 7 * T * d * N + 2 * T * d * h);
}

}  // namespace
}  // namespace megatron
