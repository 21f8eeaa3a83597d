// Sampling of tokens from logits.
#include "megatron/inference/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

at::Tensor logits_of(const std::vector<double>& probabilities) {
  return at::tensor(probabilities, at::kDouble).log();
}

// How often each token is drawn over `draws` positions.
std::vector<double> frequencies(const at::Tensor& logits, int64_t vocab,
                                const SamplingConfig& config, int64_t draws = 6000) {
  std::vector<double> counts(static_cast<size_t>(logits.size(0)), 0.0);
  for (int64_t i = 0; i < draws; ++i)
    counts[static_cast<size_t>(sample_token(logits, vocab, config, i % 3, i))] += 1.0;
  for (double& count : counts) count /= static_cast<double>(draws);
  return counts;
}

void expect_frequencies(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double tolerance = expected[i] == 0.0 ? 0.0 : 0.02;  // over 3 standard deviations
    EXPECT_NEAR(actual[i], expected[i], tolerance) << i;
  }
}

TEST(SampleToken, GreedyTakesTheFirstOfTheLargest) {
  SamplingConfig config;
  config.greedy = true;
  EXPECT_EQ(sample_token(at::tensor({1.0, 5.0, 2.0, 5.0}), 4, config, 0, 0), 1);
  config.greedy = false;
  config.top_k = 1;
  EXPECT_EQ(sample_token(at::tensor({1.0, 5.0, 2.0, 5.0}), 4, config, 0, 0), 1);
}

TEST(SampleToken, OnlyTheVocabularyCounts) {
  SamplingConfig config;
  config.greedy = true;
  EXPECT_EQ(sample_token(at::tensor({1.0, 5.0, 2.0, 50.0}), 3, config, 0, 0), 1);
  expect_frequencies(frequencies(logits_of({0.3, 0.2, 0.5}), 2, {}), {0.6, 0.4, 0.0});
}

TEST(SampleToken, DrawsFromTheDistribution) {
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4, {}), {0.1, 0.4, 0.2, 0.3});
  expect_frequencies(frequencies(at::tensor({100.0, 100.0, -100.0}), 3, {}), {0.5, 0.5, 0.0});
}

TEST(SampleToken, TemperatureDividesTheLogits) {
  SamplingConfig config;
  config.temperature = 0.5;  // squares the odds
  expect_frequencies(frequencies(logits_of({0.2, 0.8}), 2, config), {0.04 / 0.68, 0.64 / 0.68});
  config.temperature = 2.0;
  expect_frequencies(frequencies(logits_of({0.2, 0.8}), 2, config), {1.0 / 3.0, 2.0 / 3.0});
  config.temperature = 1e-3;
  expect_frequencies(frequencies(logits_of({0.2, 0.5, 0.3}), 3, config), {0.0, 1.0, 0.0});
}

TEST(SampleToken, TopKKeepsTheKMostLikely) {
  SamplingConfig config;
  config.top_k = 2;
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4, config),
                     {0.0, 0.4 / 0.7, 0.0, 0.3 / 0.7});
  // A tie: by number
  expect_frequencies(frequencies(logits_of({0.1, 0.3, 0.3, 0.3}), 4, config), {0.0, 0.5, 0.5, 0.0});
  config.top_k = 100;
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4, config), {0.1, 0.4, 0.2, 0.3});
}

TEST(SampleToken, TopPKeepsTheFewestThatReachP) {
  SamplingConfig config;
  config.top_p = 0.65;
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4, config),
                     {0.0, 0.4 / 0.7, 0.0, 0.3 / 0.7});
  config.top_p = 0.01;
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4, config), {0.0, 1.0, 0.0, 0.0});
  config.top_p = 1.0;
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4, config), {0.1, 0.4, 0.2, 0.3});
  config.top_p = 0.5;  // of what top-k leaves: 0.4 / 0.7 reaches it
  config.top_k = 2;
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4, config), {0.0, 1.0, 0.0, 0.0});
}

TEST(SampleToken, DependsOnSeedRowAndPositionAlone) {
  const at::Tensor logits = at::zeros({1000});
  SamplingConfig config;
  const int64_t first = sample_token(logits, 1000, config, 2, 7);
  sample_token(logits, 1000, config, 0, 0);
  EXPECT_EQ(sample_token(logits, 1000, config, 2, 7), first);
  std::vector<int64_t> others = {sample_token(logits, 1000, config, 3, 7),
                                 sample_token(logits, 1000, config, 2, 8)};
  config.seed = 99;
  others.push_back(sample_token(logits, 1000, config, 2, 7));
  for (const int64_t other : others) EXPECT_NE(other, first);
}

TEST(SampleToken, TakesAnyFloatingType) {
  SamplingConfig config;
  for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    EXPECT_EQ(sample_token(at::tensor({0.0, 8.0}).to(type), 2, config, 0, 1), 1);
  }
}

TEST(SampleToken, RefusesLogitsThatAreNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  for (const bool greedy : {true, false}) {
    SamplingConfig config;
    config.greedy = greedy;
    for (const auto& values : {std::vector<double>{nan, nan, nan},
                               {nan, 1.0, 2.0},
                               {1.0, nan, 2.0},
                               {1.0, 2.0, nan},
                               {1.0, inf, 2.0},
                               {-inf, -inf, -inf}}) {
      try {
        sample_token(at::tensor(values, at::kDouble), 3, config, 0, 11);
        FAIL() << "no error for " << testing::PrintToString(values);
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(),
                     "the model's logits are not finite at position 11\n"
                     "hint: the checkpoint may come from a run that diverged");
      }
    }
    EXPECT_EQ(sample_token(at::tensor({-inf, 1.0, -inf}, at::kDouble), 3, config, 0, 11), 1)
        << "an excluded token is legal";
  }
}

TEST(SamplingConfig, NamesEveryViolation) {
  SamplingConfig config;
  config.temperature = 0.0;
  config.top_k = -1;
  config.top_p = 1.5;
  config.seed = 0;
  Violations violations;
  config.validate(violations);
  EXPECT_THAT(violations.messages(), ElementsAre(HasSubstr("--temperature 0 is outside (0, 100]"),
                                                 HasSubstr("--top-k -1 is negative"),
                                                 HasSubstr("--top-p 1.5 is outside [0, 1]"),
                                                 HasSubstr("--seed 0 must be positive")));
}

}  // namespace
}  // namespace megatron
