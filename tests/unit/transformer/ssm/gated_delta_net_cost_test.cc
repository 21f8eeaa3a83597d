// The plan of a gated delta net: bytes that it saves and sends, operations.
#include "megatron/transformer/ssm/gated_delta_net_cost.h"

#include <string>

#include "megatron/comm/thread_backend.h"
#include "megatron/transformer/ssm/gated_delta_net.h"
#include "tests/unit/transformer/ssm/measured_mixer.h"

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
  for (const bool recomputed : {false, true}) {
    TransformerConfig config = measured_delta_config();
    if (recomputed) {
      config.recompute_granularity = RecomputeGranularity::kSelective;
      config.recompute_modules = {"gdn_norm_out", "layernorm"};
    }
    const LayerShape shape = mixer_shape(32, 1, 1);
    const SublayerCost cost = gated_delta_net_cost(config, 1, shape, false);
    const MeasuredMixer measured =
        measure_mixer<GatedDeltaNet>(config, ParallelGroups(), shape, 0.0);
    // The input is not counted; the output is as large. A few bytes: scalars, an anchor.
    EXPECT_NEAR(static_cast<double>(measured.saved), static_cast<double>(cost.saved.total()), 64)
        << recomputed;
    EXPECT_EQ(cost.forward_end, cost.saved.total());
  }
}

TEST(GatedDeltaNetCost, SendsWhatThePlanSays) {
  for (const auto& [tensor, context] : {std::pair{4, 1}, {1, 2}, {2, 2}}) {
    TransformerConfig config = measured_delta_config();
    config.norm_placement = NormPlacement::kPost;
    const LayerShape shape = mixer_shape(32, tensor, context);
    const SublayerCost cost = gated_delta_net_cost(config, 1, shape, false);
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = tensor;
    parallel.context_parallel_size = context;
    run_ranks(tensor * context, [&](const std::shared_ptr<Backend>& world) {
      double bytes = 0;
      const ParallelGroups ranks =
          make_parallel_groups(parallel, std::make_shared<RingBytesBackend>(world, &bytes));
      const MeasuredMixer measured = measure_mixer<GatedDeltaNet>(config, ranks, shape, bytes);
      EXPECT_DOUBLE_EQ(measured.forward, cost.tensor.forward + cost.context.forward)
          << tensor << " x " << context;
      EXPECT_DOUBLE_EQ(measured.backward, cost.tensor.backward + cost.context.backward)
          << tensor << " x " << context;
    });
  }
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
