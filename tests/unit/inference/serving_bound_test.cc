#include "megatron/inference/bounds/serving_bound.h"

#include <gtest/gtest.h>

#include "megatron/comm/described_backend.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/generator.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

// Llama 3 8B on a GPU that copies 4.26 TB/s and multiplies at 690 TFLOP/s, by hand.
TEST(ServingBound, IsWhatMemoryAndArithmeticAllow) {
  const MachineRates rates{4.26e12, 690e12};
  const ServedCost llama{15.0e9, 13.96e9, 0.0, 1.05e9, 131072.0, 524288.0};
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
  EXPECT_NEAR(serving_bound(llama, shared, rates).token_seconds, 0.0103, 1e-4);
  EXPECT_GT(serving_bound(llama, shared, rates).tokens_per_second, 1.2 * full.tokens_per_second);
  const ServingBound prompts = serving_bound(
      llama, {.requests = 64, .together = 64, .prompt_tokens = 2048, .output_tokens = 1}, rates);
  EXPECT_NEAR(prompts.tokens_per_second * 2048, 47600, 200);
  // The same with weights and cache in FP8, but for the head, whose products run at 1150 TFLOP/s.
  const MachineRates fp8_rates{4.26e12, 690e12, 1150e12};
  const ServedCost fp8{8.03e9, 0.0, 13.96e9, 1.05e9, 65536.0, 524288.0};
  EXPECT_NEAR(
      1.0 / serving_bound(fp8, {.prompt_tokens = 1, .output_tokens = 257}, fp8_rates).token_seconds,
      530, 3);
  EXPECT_NEAR(serving_bound(fp8, {.requests = 64, .together = 64, .prompt_tokens = 2048}, fp8_rates)
                      .tokens_per_second *
                  2048,
              77400, 200);
}

TEST(ServingBound, CountsWeightsInFp8) {
  const ParallelGroups one;
  ModelConfig config = small_served_model();
  TransformerConfig& t = config.transformer;
  t.hidden_size = t.ffn_hidden_size = 128;
  t.untie_embeddings_and_output_weights = true;
  t.fp8_format = Fp8Format::kE4M3;
  t.fp8_recipe = Fp8Recipe::kTensorwise;
  Served served(Served::make(config, one), {}, at::kBFloat16);
  const std::optional<ServedCost> cost = served_cost(*served.model, 1);
  ASSERT_TRUE(cost);
  constexpr double kOfLayer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 128.0;
  EXPECT_EQ(cost->operations, 0);
  EXPECT_EQ(cost->fp8_operations, 2 * 2 * kOfLayer);
  EXPECT_EQ(cost->head_operations, 2 * 64 * 128);
  EXPECT_EQ(cost->weight_bytes, 2 * kOfLayer + 2 * (64 * 128 + 5 * 128));
  // Once they are used, quantised weights are kept as codes alone.
  full_logits(*served.model, std::vector<int32_t>{1, 2, 3});
  const std::optional<ServedCost> used = served_cost(*served.model, 1);
  EXPECT_EQ(used->fp8_operations, cost->fp8_operations);
  EXPECT_EQ(used->weight_bytes, cost->weight_bytes);
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

// A rank has half of the layers and of the vocabulary, and of one group the same as its neighbour.
TEST(ServingBound, CountsWhatOneOfTwoTensorRanksHas) {
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = 2;
  const ParallelGroups one, two = make_parallel_groups(parallel, described_backend(0, 2));
  for (const int64_t groups : {2, 1}) {
    ModelConfig config = small_served_model();
    config.transformer.num_query_groups = groups;
    config.transformer.untie_embeddings_and_output_weights = true;
    const auto cost_over = [&](const ParallelGroups& ranks) {
      Served served(Served::make(config, ranks), {}, at::kFloat);
      return served_cost(*served.model, 2);
    };
    const std::optional<ServedCost> whole = cost_over(one), half = cost_over(two);
    ASSERT_TRUE(whole && half);
    EXPECT_EQ(half->cache_bytes, whole->cache_bytes / (groups == 2 ? 2 : 1));
    EXPECT_EQ(half->pair_operations, whole->pair_operations / 2);
    EXPECT_EQ(half->head_operations, whole->head_operations / 2);
    if (groups == 2) {
      EXPECT_EQ(half->operations, whole->operations / 2);
    }
  }
}

TEST(ServingBound, RatesOfThisMachineAreMeasured) {
  const MachineRates rates = measure_rates(at::kFloat, at::kCPU, /*fp8=*/true);
  EXPECT_GT(rates.copied_bytes, 1e8);
  EXPECT_LT(rates.copied_bytes, 1e13);
  EXPECT_GT(rates.operations, 1e8);
  EXPECT_LT(rates.operations, 1e14);
  EXPECT_GT(rates.fp8_operations, 1e8);
  EXPECT_EQ(measure_rates(at::kFloat, at::kCPU).fp8_operations, 0.0);
}

}  // namespace
}  // namespace megatron
