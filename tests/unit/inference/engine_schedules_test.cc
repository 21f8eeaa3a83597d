// Random schedules of an engine on real models in fp64: whatever makes room for whatever, however
// often the cache and the weights leave, each request gets the tokens that it gets alone, by
// forwards over the whole of its text without a cache.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "tests/unit/inference/served_schedules.h"
#include "tests/unit/inference/toy_model.h"

namespace megatron {
namespace {

std::vector<std::unique_ptr<ScheduledModel>> scheduled_models(const ParallelGroups& one) {
  std::vector<std::unique_ptr<ScheduledModel>> models;
  const auto add = [&](const std::string& name, const ModelConfig& config) {
    models.push_back(std::make_unique<ScheduledModel>(
        name, [&one, config] { return Served::make(config, one); }));
  };
  models.push_back(std::make_unique<ScheduledModel>("adapters", golden_model("llama2"),
                                                    golden_adapter("llama_all"), one));
  add("grouped queries", small_served_model());
  ModelConfig window = small_served_model();
  window.transformer.window_size = {5, 0};
  add("windows", window);
  ModelConfig longrope = small_served_model();
  longrope.transformer.rope_scaling_type = RopeScaling::kLongRope;
  longrope.transformer.rope_original_max_position_embeddings = 15;
  longrope.transformer.longrope_short_factor.assign(4, 1.0);
  longrope.transformer.longrope_long_factor = {2.0, 3.0, 4.0, 5.0};
  add("longrope", longrope);
  add("latents", latent_served_model());
  for (const char* pattern : {"M-", "GM*-"}) add(pattern, hybrid_served_model(pattern));
  models.push_back(
      std::make_unique<ScheduledModel>("states and rows", [&one] { return make_toy_model(one); }));
  return models;
}

TEST(ServedSchedules, RandomOnesGiveTheTokensOfEachRequestAlone) {
  const ParallelGroups one;
  const auto models = scheduled_models(one);
  const char* given = std::getenv("MEGATRON_SERVED_SCHEDULES");
  const int count = given != nullptr ? std::atoi(given) : 48;
  Counts counts;
  for (int seed = 0; seed < count; ++seed) {
    ScheduledModel& model = *models[static_cast<size_t>(seed) % models.size()];
    SCOPED_TRACE(cat("seed ", seed, ", ", model.name()));
    play_schedule(model, static_cast<uint32_t>(seed), counts);
    if (testing::Test::HasFailure()) return;
  }
  for (const auto& [what, times] : counts) {
    if (given != nullptr) std::cout << "  " << what << ": " << times << "\n";
    EXPECT_GT(times, 0) << what;
  }
  EXPECT_EQ(counts.size(), 24u);
}

}  // namespace
}  // namespace megatron
