#include "megatron/inference/bounds/serving_bound.h"

#include <gtest/gtest.h>

#include "megatron/comm/parallel_groups.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

// Llama 3 8B on a GPU that copies 4.26 TB/s and multiplies at 690 TFLOP/s, by hand.
TEST(ServingBound, IsWhatMemoryAndArithmeticAllow) {
  const MachineRates rates{4.26e12, 690e12};
  const ServedCost llama{15.0e9, 13.96e9, 1.05e9, 131072.0, 524288.0};
  const ServingBound alone =
      serving_bound(llama, {.prompt_tokens = 1, .output_tokens = 257}, rates);
  EXPECT_NEAR(1.0 / alone.token_seconds, 283, 2);
  EXPECT_NEAR(alone.tokens_per_second, 283, 2);
  const ServedLoad many{
      .requests = 256, .together = 256, .prompt_tokens = 1000, .output_tokens = 1000};
  const ServingBound full = serving_bound(llama, many, rates);
  EXPECT_NEAR(full.token_seconds, 0.0174, 1e-4);
  EXPECT_NEAR(full.tokens_per_second, 11300, 100);
  ServedLoad shared = many;
  shared.prompt_tokens = 100;
  shared.cached_tokens = 900;
  EXPECT_GT(serving_bound(llama, shared, rates).tokens_per_second, 1.2 * full.tokens_per_second);
  const ServingBound prompts = serving_bound(
      llama, {.requests = 64, .together = 64, .prompt_tokens = 2048, .output_tokens = 1}, rates);
  EXPECT_NEAR(prompts.tokens_per_second * 2048, 47600, 200);
}

TEST(ServingBound, CountsTheWeightsThatATokenReads) {
  const ParallelGroups one;
  for (const bool untied : {false, true}) {
    ModelConfig config = small_served_model();
    config.transformer.untie_embeddings_and_output_weights = untied;
    Served served(Served::make(config, one), {}, at::kFloat);
    const std::optional<ServedCost> cost = served_cost(*served.model, 2);
    ASSERT_TRUE(cost);
    // Of 32 features in four heads and two groups; the MLP has 64, gated.
    constexpr double kOfLayer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64.0;
    EXPECT_EQ(cost->operations, 2 * 2 * kOfLayer);
    EXPECT_EQ(cost->head_operations, 2 * 64 * 32);
    EXPECT_EQ(cost->weight_bytes, 4 * (2 * kOfLayer + 64 * 32 + 5 * 32));
    EXPECT_EQ(cost->cache_bytes, 2 * 2 * 16 * 2);
    EXPECT_EQ(cost->pair_operations, 2 * 4 * 32);
  }
  ModelConfig experts = small_served_model();
  experts.transformer.num_experts = 4;
  Served served(Served::make(experts, one), {}, at::kFloat);
  EXPECT_FALSE(served_cost(*served.model, 2));
}

TEST(ServingBound, RatesOfThisMachineAreMeasured) {
  const MachineRates rates = measure_rates(at::kFloat, at::kCPU);
  EXPECT_GT(rates.copied_bytes, 1e8);
  EXPECT_LT(rates.copied_bytes, 1e13);
  EXPECT_GT(rates.operations, 1e8);
  EXPECT_LT(rates.operations, 1e14);
}

}  // namespace
}  // namespace megatron
