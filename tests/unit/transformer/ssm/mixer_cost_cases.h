// What holds for the plan of every recurrent sublayer.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/comm/thread_backend.h"
#include "tests/unit/transformer/ssm/measured_mixer.h"

namespace megatron {

using MixerCost = SublayerCost (*)(const TransformerConfig&, int64_t, const LayerShape&, bool);

// With and without these modules computed again.
template <class Mixer>
void expect_planned_saved_bytes(const TransformerConfig& plain,
                                const std::vector<std::string>& modules, MixerCost cost_of) {
  for (const bool recomputed : {false, true}) {
    TransformerConfig config = plain;
    if (recomputed) {
      config.recompute_granularity = RecomputeGranularity::kSelective;
      config.recompute_modules = modules;
    }
    const LayerShape shape = mixer_shape(32, 1, 1);
    const SublayerCost cost = cost_of(config, 1, shape, false);
    const MeasuredMixer measured = measure_mixer<Mixer>(config, ParallelGroups(), shape, 0.0);
    // The input is not counted; the output is as large. A few bytes: scalars, an anchor.
    EXPECT_NEAR(static_cast<double>(measured.saved), static_cast<double>(cost.saved.total()), 64)
        << recomputed;
    EXPECT_EQ(cost.forward_end, cost.saved.total());
  }
}

template <class Mixer>
void expect_planned_sent_bytes(TransformerConfig config, MixerCost cost_of,
                               const std::string& label) {
  config.norm_placement = NormPlacement::kPost;
  for (const auto& [tensor, context] : {std::pair{4, 1}, {1, 2}, {2, 2}}) {
    const LayerShape shape = mixer_shape(32, tensor, context);
    const SublayerCost cost = cost_of(config, 1, shape, false);
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = tensor;
    parallel.context_parallel_size = context;
    run_ranks(tensor * context, [&](const std::shared_ptr<Backend>& world) {
      double bytes = 0;
      const ParallelGroups ranks =
          make_parallel_groups(parallel, std::make_shared<RingBytesBackend>(world, &bytes));
      const MeasuredMixer measured = measure_mixer<Mixer>(config, ranks, shape, bytes);
      EXPECT_DOUBLE_EQ(measured.forward, cost.tensor.forward + cost.context.forward)
          << label << tensor << " x " << context;
      EXPECT_DOUBLE_EQ(measured.backward, cost.tensor.backward + cost.context.backward)
          << label << tensor << " x " << context;
    });
  }
}

}  // namespace megatron
