// Sampling of tokens from logits: what a sequence asks for, and that nothing else counts. The
// arithmetic of one row is compared with a sort in fp64 in tests/kernels/sampling_cases.cc.
#include "megatron/inference/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

SlotStart sequence(int32_t slot, const SamplingParameters& sampling, int32_t choice = 0) {
  SlotStart start;
  start.slot = slot;
  start.choice = choice;
  start.sampling = sampling;
  return start;
}

// Draws of rows of logits, each by the sequence in the slot of its number.
std::vector<DrawnToken> draw(TokenSampler& sampler, const at::Tensor& logits,
                             const std::vector<TokenSampler::Row>& rows,
                             const std::vector<LogProbabilityWishes>& wishes = {}) {
  std::vector<int32_t> slots;
  for (const TokenSampler::Row& row : rows) slots.push_back(row.slot);
  const DrawReport report(slots, wishes);
  const TokenSampler::Draws draws = sampler.draw(logits, rows, report);
  EXPECT_EQ(draws.report().numel(), report.size());
  return report.read(draws.report().const_data_ptr<double>());
}

int32_t draw_one(const at::Tensor& logits, int64_t vocab, const SlotStart& start,
                 int64_t position = 0, std::span<const uint32_t> mask = {}) {
  TokenSampler sampler(vocab, logits.size(0), {}, at::kCPU);
  sampler.start(start);
  return draw(sampler, logits.unsqueeze(0), {{start.slot, position, mask}})[0].id;
}

at::Tensor logits_of(const std::vector<double>& probabilities) {
  return at::tensor(probabilities, at::kDouble).log();
}

// How often each token is drawn: over positions, choices and seeds.
std::vector<double> frequencies(const at::Tensor& logits, int64_t vocab,
                                SamplingParameters parameters = {}) {
  constexpr int32_t kSequences = 30;
  constexpr int64_t kPositions = 400;
  std::vector<double> counts(static_cast<size_t>(logits.size(0)), 0.0);
  TokenSampler sampler(vocab, logits.size(0), {}, at::kCPU);
  std::vector<TokenSampler::Row> rows(kSequences);
  for (int32_t i = 0; i < kSequences; ++i) {
    parameters.seed = static_cast<uint64_t>(i % 6);
    sampler.start(sequence(i, parameters, i / 6));
    rows[static_cast<size_t>(i)].slot = i;
  }
  const at::Tensor all = logits.unsqueeze(0).expand({kSequences, -1});
  for (int64_t position = 0; position < kPositions; ++position) {
    for (TokenSampler::Row& row : rows) row.position = position;
    for (const DrawnToken& drawn : draw(sampler, all, rows))
      counts[static_cast<size_t>(drawn.id)] += 1.0 / (kSequences * kPositions);
  }
  return counts;
}

void expect_frequencies(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    // Four standard deviations
    const double tolerance = 4.0 * std::sqrt(expected[i] * (1.0 - expected[i]) / 12000.0) + 1e-9;
    EXPECT_NEAR(actual[i], expected[i], tolerance) << i;
  }
}

TEST(TokenSampler, DrawsFromTheDistribution) {
  expect_frequencies(frequencies(logits_of({0.1, 0.4, 0.2, 0.3}), 4), {0.1, 0.4, 0.2, 0.3});
  expect_frequencies(frequencies(at::tensor({100.0, 100.0, -100.0}), 3), {0.5, 0.5, 0.0});
  std::vector<double> many(97), rare = {0.998, 0.001, 0.001};
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<double>(i) / (97.0 * 48.0);
  expect_frequencies(frequencies(logits_of(many), 97), many);
  expect_frequencies(frequencies(logits_of(rare), 3), rare);
}

TEST(TokenSampler, TheFourTokensOfABlockOfTheGeneratorAreIndependent) {
  // Of two draws at positions that differ, every pair of tokens is as frequent as its product.
  const at::Tensor logits = at::zeros({4});
  std::vector<double> pairs(16, 0.0);
  TokenSampler sampler(4, 4, {}, at::kCPU);
  sampler.start(sequence(0, {}));
  int32_t before = 0;
  for (int64_t position = 0; position < 8000; ++position) {
    const int32_t id = draw(sampler, logits.unsqueeze(0), {{0, position}})[0].id;
    pairs[static_cast<size_t>(4 * before + id)] += 1.0 / 8000.0;
    before = id;
  }
  for (const double pair : pairs) EXPECT_NEAR(pair, 1.0 / 16.0, 0.011);
}

TEST(TokenSampler, OnlyTheVocabularyCounts) {
  SamplingParameters greedy;
  greedy.temperature = 0.0;
  EXPECT_EQ(draw_one(at::tensor({1.0, 5.0, 2.0, 50.0}), 3, sequence(0, greedy)), 1);
  expect_frequencies(frequencies(logits_of({0.3, 0.2, 0.5}), 2), {0.6, 0.4, 0.0});
}

TEST(TokenSampler, TemperatureDividesTheLogits) {
  SamplingParameters p;
  p.temperature = 0.5;  // squares the odds
  expect_frequencies(frequencies(logits_of({0.2, 0.8}), 2, p), {0.04 / 0.68, 0.64 / 0.68});
  p.temperature = 2.0;
  expect_frequencies(frequencies(logits_of({0.2, 0.8}), 2, p), {1.0 / 3.0, 2.0 / 3.0});
  p.temperature = 1e-3;
  expect_frequencies(frequencies(logits_of({0.2, 0.5, 0.3}), 3, p), {0.0, 1.0, 0.0});
}

TEST(TokenSampler, KeepsWhatTopKTopPAndMinPKeep) {
  const at::Tensor logits = logits_of({0.1, 0.4, 0.2, 0.3});
  SamplingParameters k, p, both, least;
  k.top_k = 2;
  expect_frequencies(frequencies(logits, 4, k), {0.0, 0.4 / 0.7, 0.0, 0.3 / 0.7});
  expect_frequencies(frequencies(logits_of({0.1, 0.3, 0.3, 0.3}), 4, k), {0.0, 0.5, 0.5, 0.0});
  p.top_p = 0.65;
  expect_frequencies(frequencies(logits, 4, p), {0.0, 0.4 / 0.7, 0.0, 0.3 / 0.7});
  both.top_k = 2;
  both.top_p = 0.5;  // of what top-k leaves: 0.4 / 0.7 reaches it
  expect_frequencies(frequencies(logits, 4, both), {0.0, 1.0, 0.0, 0.0});
  least.min_p = 0.6;
  expect_frequencies(frequencies(logits, 4, least), {0.0, 0.4 / 0.7, 0.0, 0.3 / 0.7});
}

TEST(TokenSampler, AllowsWhatTheSequenceAllows) {
  const at::Tensor logits = at::tensor({4.0, 3.0, 2.0, 1.0, 0.0});
  SlotStart start = sequence(3, {});
  start.sampling.temperature = 0.0;
  start.prompt_length = 7;
  start.min_tokens = 2;
  start.ends = {0, 1};
  for (const auto& [position, id] :
       std::vector<std::pair<int64_t, int32_t>>{{7, 2}, {8, 2}, {9, 0}})
    EXPECT_EQ(draw_one(logits, 5, start, position), id) << position;
  start.sampling.forbidden = {0, 2};
  EXPECT_EQ(draw_one(logits, 5, start, 9), 1);
  EXPECT_EQ(draw_one(logits, 5, start, 7), 3);
  start.sampling.logit_bias = {{2, 100.0f}, {4, 3.5f}};
  EXPECT_EQ(draw_one(logits, 5, start, 7), 4) << "a bias allows no forbidden id";
  const std::vector<uint32_t> mask = {0b01101};
  EXPECT_EQ(draw_one(logits, 5, start, 7, mask), 3);
  const std::vector<uint32_t> none = {0b00101};
  EXPECT_EQ(draw_one(logits, 5, start, 7, none), -1) << "nothing that the mask allows is left";
}

TEST(TokenSampler, PenaltiesCountTheSequencesOwnIds) {
  const at::Tensor logits = at::tensor({2.0, 1.9, 1.8, -1.0}).unsqueeze(0);
  SlotStart start = sequence(0, {});
  start.sampling.temperature = 0.0;
  start.prompt_length = 3;  // a given row and two ids
  start.rows = std::make_shared<GivenRows>(GivenRows{1, 1, {0.0f}});
  start.ids = {0, 3, 1};
  const auto drawn = [&](double repetition, double presence, double frequency, int draws) {
    start.sampling.repetition_penalty = repetition;
    start.sampling.presence_penalty = presence;
    start.sampling.frequency_penalty = frequency;
    TokenSampler sampler(4, 4, {}, at::kCPU);
    sampler.start(sequence(5, start.sampling));  // of another one, which has no ids
    sampler.start(start);
    std::vector<int32_t> ids;
    for (int i = 0; i < draws; ++i) ids.push_back(draw(sampler, logits, {{0, 4 + i}})[0].id);
    return ids;
  };
  EXPECT_THAT(drawn(1.2, 0, 0, 3), ElementsAre(2, 0, 0)) << "prompt and output";
  EXPECT_THAT(drawn(1, 0.15, 0, 4), ElementsAre(0, 0, 0, 0)) << "id 1 alone is in the output";
  EXPECT_THAT(drawn(1, 0, 0.06, 6), ElementsAre(0, 0, 0, 1, 0, 2));
}

// The same sequence gives the same tokens in other slots, among others, and at any time.
TEST(TokenSampler, DependsOnSeedChoiceAndPositionAlone) {
  const at::Tensor logits = at::zeros({1000});
  SamplingParameters p;
  p.seed = 77;
  const int32_t first = draw_one(logits, 1000, sequence(0, p, 2), 7);
  EXPECT_EQ(draw_one(logits, 1000, sequence(9, p, 2), 7), first);
  TokenSampler sampler(1000, 1000, {}, at::kCPU);
  for (int32_t slot = 0; slot < 4; ++slot) {
    SamplingParameters other;
    other.top_k = slot;
    other.top_p = 0.5;
    other.repetition_penalty = 2.0;
    sampler.start(slot == 3 ? sequence(3, p, 2) : sequence(slot, other, slot));
  }
  const at::Tensor many = at::randn({4, 1000});
  many[1].zero_();
  EXPECT_EQ(draw(sampler, many, {{0, 1}, {3, 7}, {2, 1}, {1, 1}})[1].id, first);
  std::set<int32_t> others = {draw_one(logits, 1000, sequence(0, p, 3), 7),
                              draw_one(logits, 1000, sequence(0, p, 2), 8)};
  p.seed = 78;
  others.insert(draw_one(logits, 1000, sequence(0, p, 2), 7));
  EXPECT_EQ(others.size(), 3u);
  EXPECT_FALSE(others.contains(first));
}

TEST(TokenSampler, TakesAnyFloatingType) {
  for (const auto type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble})
    EXPECT_EQ(draw_one(at::tensor({0.0, 8.0}).to(type), 2, sequence(0, {}), 1), 1);
}

TEST(TokenSampler, LogitsThatAreNotFiniteFailTheirRowAlone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor logits =
      at::tensor({nan,        nan,        nan,        nan, 1.0,        2.0,       1.0, nan,
                  2.0,        1.0,        2.0,        nan, 1.0,        kInfinity, 2.0, -kInfinity,
                  -kInfinity, -kInfinity, -kInfinity, 1.0, -kInfinity, 3.0,       1.0, 2.0})
          .view({8, 3});
  for (const double temperature : {0.0, 1.0})
    for (const auto& [top_k, top_p] : std::vector<std::pair<int32_t, double>>{{0, 1}, {2, 0.9}}) {
      SamplingParameters p;
      p.temperature = temperature;
      p.top_k = top_k;
      p.top_p = top_p;
      TokenSampler sampler(3, 3, {}, at::kCPU);
      std::vector<TokenSampler::Row> rows;
      std::vector<LogProbabilityWishes> wishes(8);
      for (int32_t i = 0; i < 8; ++i) {
        sampler.start(sequence(i, p));
        rows.push_back({i, 3});
        wishes[static_cast<size_t>(i)].output_top = 1;
        wishes[static_cast<size_t>(i)].processed = i % 2 == 0;
      }
      const auto draws = draw(sampler, logits, rows, wishes);
      for (size_t i = 0; i < 8; ++i) {
        EXPECT_EQ(draws[i].finite, i >= 6) << i;
        EXPECT_EQ(draws[i].log_probabilities.has_value(), i >= 6) << i;
      }
      EXPECT_EQ(draws[6].id, 1) << "an excluded token is legal";
      EXPECT_EQ(draws[6].log_probabilities->chosen.log_probability, 0.0f);
    }
}

void expect_log_softmax(const at::Tensor& logits) {
  const at::Tensor exact = logits.to(at::kDouble);  // rounding of a reference in fp32 is as large
  SamplingParameters p;
  p.temperature = 0.5;
  p.top_k = 3;
  std::vector<LogProbabilityWishes> wishes(3);
  wishes[0].output_top = 5;
  wishes[1].output_top = 20;
  wishes[1].processed = true;
  TokenSampler sampler(50, 50, {}, at::kCPU);
  for (int32_t i = 0; i < 3; ++i) sampler.start(sequence(i, p));
  const auto draws = draw(sampler, logits, {{0, 1}, {1, 1}, {2, 1}}, wishes);
  EXPECT_FALSE(draws[2].log_probabilities);
  const auto expect = [&](size_t row, const at::Tensor& expected, size_t top) {
    const PositionLogProbabilities& p = *draws[row].log_probabilities;
    EXPECT_EQ(p.chosen.id, draws[row].id);
    EXPECT_NEAR(p.chosen.log_probability, expected[p.chosen.id].item<double>(), 1e-6);
    ASSERT_EQ(p.top.size(), top);
    const auto [values, ids] = expected.topk(static_cast<int64_t>(top));
    bool found = false;
    for (size_t i = 0; i < top; ++i) {
      EXPECT_EQ(p.top[i].id, ids[static_cast<int64_t>(i)].item<int64_t>());
      EXPECT_NEAR(p.top[i].log_probability, values[static_cast<int64_t>(i)].item<double>(), 1e-6);
      if (p.top[i].id != p.chosen.id) continue;
      found = true;
      EXPECT_EQ(p.top[i].log_probability, p.chosen.log_probability) << "not the same bits";
    }
    EXPECT_TRUE(found);
  };
  expect(0, exact[0].log_softmax(0), 5);
  const at::Tensor third = std::get<0>(exact[1].topk(3))[2];
  expect(1, at::where(exact[1] >= third, exact[1] / 0.5, -kInfinity).log_softmax(0), 3);

  const LogProbabilityReport report({2, 0, 1});
  const at::Tensor scores = sampler.score(logits, {7, 8, 9}, report.most());
  ASSERT_EQ(scores.numel(), report.size());
  for (int64_t i = 0; i < 3; ++i) {
    const auto read = report.read(scores.const_data_ptr<double>(), i, static_cast<int32_t>(7 + i));
    const at::Tensor expected = exact[i].log_softmax(0);
    EXPECT_NEAR(read.chosen.log_probability, expected[7 + i].item<double>(), 1e-6);
    EXPECT_EQ(read.top.size(), std::vector<size_t>({2, 0, 1})[static_cast<size_t>(i)]);
    if (read.top.empty()) continue;
    EXPECT_EQ(read.top[0].id, expected.argmax().item<int64_t>());
  }
}

// Below 16, where a number of fp32 has a place of 1e-6.
TEST(TokenSampler, LogProbabilitiesAreThoseOfLogSoftmax) {
  at::manual_seed(1);
  const at::Tensor logits = at::randn({3, 50}, at::kDouble) * 2;
  expect_log_softmax(logits);
  expect_log_softmax(logits.to(at::kFloat));
}

// Ranks that share the vocabulary, unevenly and with a last one that has padding alone, draw what
// one rank draws, bit for bit.
TEST(TokenSampler, RanksWithPartsOfTheVocabularyDrawWhatOneRankDraws) {
  constexpr int64_t kVocab = 35, kRows = 12;
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    at::Tensor logits = (at::randn({kRows, 40}) * 2).mul(2).round().div(2).to(type);  // ties
    logits[11].select(0, 30).fill_(kInfinity);
    const std::vector<uint32_t> mask = {0xf0f0f0f0u, 0x5u};
    std::vector<DrawnToken> expected;
    at::Tensor scores;
    const auto run = [&](const ProcessGroup& tp) {
      TokenSampler sampler(kVocab, 40 / tp.size(), tp, at::kCPU);
      std::vector<TokenSampler::Row> rows;
      std::vector<LogProbabilityWishes> wishes(kRows);
      std::vector<int32_t> targets;
      for (int32_t i = 0; i < kRows; ++i) {
        SamplingParameters p;
        p.seed = static_cast<uint64_t>(i);
        p.temperature = i == 0 ? 0.0 : 1.5;
        p.top_k = i % 2 == 1 ? 5 : 0;
        p.top_p = i % 3 == 1 ? 0.5 : 1.0;
        p.min_p = i % 4 == 2 ? 0.1 : 0.0;
        p.presence_penalty = i % 5 == 3 ? 1.0 : 0.0;
        if (i == 4) p.logit_bias = {{2, 4.0f}, {34, 3.0f}};
        SlotStart start = sequence(i, p);
        start.ids = {1, 34, 20, 20};
        sampler.start(start);
        rows.push_back(
            {i, 100 - i, i == 6 ? std::span<const uint32_t>(mask) : std::span<const uint32_t>()});
        wishes[static_cast<size_t>(i)].output_top = i % 3 == 0 ? 2 + i : -1;
        wishes[static_cast<size_t>(i)].processed = i % 2 == 0;
        targets.push_back(34 - 3 * i);
      }
      const at::Tensor own = logits.narrow(1, tp.rank() * (40 / tp.size()), 40 / tp.size());
      auto draws = draw(sampler, own, rows, wishes);
      for (TokenSampler::Row& row : rows)
        row.position += 50;  // with the ids that were drawn counted
      for (DrawnToken& second : draw(sampler, own, rows, wishes))
        draws.push_back(std::move(second));
      return std::pair(std::move(draws), sampler.score(own, targets, 4));
    };
    std::tie(expected, scores) = run({});
    EXPECT_FALSE(expected[11].finite);
    std::mutex mutex;
    for (const int ranks : {2, 4, 8, 10}) {
      run_ranks(ranks, [&](const std::shared_ptr<Backend>& world) {
        const auto [draws, own_scores] = run(ProcessGroup(world, "tp"));
        const std::lock_guard lock(mutex);
        for (size_t i = 0; i < draws.size(); ++i) {
          EXPECT_EQ(draws[i].finite, expected[i].finite);
          if (!draws[i].finite) continue;
          EXPECT_EQ(draws[i].id, expected[i].id) << "row " << i << " on " << ranks << " ranks";
          EXPECT_EQ(draws[i].log_probabilities, expected[i].log_probabilities) << i;
        }
        EXPECT_TRUE(at::equal(own_scores.narrow(0, 0, 11 * 9), scores.narrow(0, 0, 11 * 9)));
      });
    }
  }
}

TEST(SamplingConfig, BecomesParameters) {
  SamplingConfig config;
  EXPECT_EQ(config.parameters().top_p, 1.0);
  EXPECT_EQ(config.parameters().temperature, 1.0);
  config.greedy = true;
  config.seed = 5;
  config.top_k = int64_t{1} << 40;
  EXPECT_EQ(config.parameters().temperature, 0.0);
  EXPECT_EQ(config.parameters().seed, 5u);
  EXPECT_EQ(config.parameters().top_k, std::numeric_limits<int32_t>::max());
}

TEST(SamplingConfig, NamesEveryViolation) {
  SamplingConfig config;
  Violations violations;
  config.temperature = 0.0;  // greedy
  config.validate(violations);
  config.temperature = -0.5;
  config.top_k = -1;
  config.top_p = 1.5;
  config.seed = 0;
  config.validate(violations);
  EXPECT_THAT(
      violations.messages(),
      ElementsAre(HasSubstr("--temperature -0.5 is outside [0, 100]"),
                  HasSubstr("--top-k -1 is negative"), HasSubstr("--top-p 1.5 is outside [0, 1]"),
                  HasSubstr("--seed 0 must be positive")));
}

}  // namespace
}  // namespace megatron
