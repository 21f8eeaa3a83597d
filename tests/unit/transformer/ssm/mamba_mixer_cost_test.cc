// The plan of a Mamba-2 sublayer: bytes that it saves and sends, operations.
#include "megatron/transformer/ssm/mamba_mixer_cost.h"

#include <string>

#include "megatron/comm/thread_backend.h"
#include "megatron/transformer/ssm/mamba_mixer.h"
#include "tests/unit/transformer/ssm/measured_mixer.h"
#include "tests/unit/transformer/ssm/mixer_config.h"

namespace megatron {
namespace {

TEST(MambaMixerCost, SavesWhatThePlanSays) {
  for (const bool recomputed : {false, true}) {
    TransformerConfig config = mixer_config(8, 2);
    if (recomputed) {
      config.recompute_granularity = RecomputeGranularity::kSelective;
      config.recompute_modules = {"mamba_norm", "layernorm"};
    }
    const LayerShape shape = mixer_shape(32, 1, 1);
    const SublayerCost cost = mamba_mixer_cost(config, 1, shape, false);
    const MeasuredMixer measured = measure_mixer<MambaMixer>(config, ParallelGroups(), shape, 0.0);
    // The input is not counted; the output is as large. A few bytes: scalars, an anchor.
    EXPECT_NEAR(static_cast<double>(measured.saved), static_cast<double>(cost.saved.total()), 64)
        << recomputed;
    EXPECT_EQ(cost.forward_end, cost.saved.total());
  }
}

TEST(MambaMixerCost, SendsWhatThePlanSays) {
  for (const int64_t groups : {1, 2, 8})
    for (const auto& [tensor, context] : {std::pair{4, 1}, {1, 2}, {2, 2}}) {
      TransformerConfig config = mixer_config(8, groups);
      config.norm_placement = NormPlacement::kPost;
      const LayerShape shape = mixer_shape(32, tensor, context);
      const SublayerCost cost = mamba_mixer_cost(config, 1, shape, false);
      ParallelConfig parallel;
      parallel.tensor_model_parallel_size = tensor;
      parallel.context_parallel_size = context;
      run_ranks(tensor * context, [&](const std::shared_ptr<Backend>& world) {
        double bytes = 0;
        const ParallelGroups ranks =
            make_parallel_groups(parallel, std::make_shared<RingBytesBackend>(world, &bytes));
        const MeasuredMixer measured = measure_mixer<MambaMixer>(config, ranks, shape, bytes);
        EXPECT_DOUBLE_EQ(measured.forward, cost.tensor.forward + cost.context.forward)
            << groups << " groups, " << tensor << " x " << context;
        EXPECT_DOUBLE_EQ(measured.backward, cost.tensor.backward + cost.context.backward)
            << groups << " groups, " << tensor << " x " << context;
      });
    }
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
