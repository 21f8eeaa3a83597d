#include "megatron/pipeline_parallel/stage_division.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

namespace megatron {
namespace {

using Counts = std::vector<int64_t>;

StageLoads loads(const std::vector<double>& times, int64_t stages, int64_t chunks = 1) {
  StageLoads out;
  for (const double time : times) out.layers.push_back({time, time, 1});
  for (int64_t stage = 0; stage < stages; ++stage)
    out.in_flight.push_back(static_cast<double>(stages - stage));
  out.chunks = chunks;
  return out;
}

TEST(DivideOverStages, TheSlowestStageIsAsFastAsCanBe) {
  EXPECT_EQ(divide_over_stages(loads({4, 4, 1, 1, 1, 1}, 3)), (Counts{1, 1, 4}));
  StageLoads with_head = loads(std::vector<double>(8, 1.0), 2);
  with_head.head.time = 2;
  EXPECT_EQ(divide_over_stages(with_head), (Counts{5, 3}));
  StageLoads with_embedding = loads(std::vector<double>(8, 1.0), 2);
  with_embedding.embedding.time = 2;
  EXPECT_EQ(divide_over_stages(with_embedding), (Counts{3, 5}));
}

// Stages hold several segments, whose times add up.
TEST(DivideOverStages, TimesOfTheSegmentsOfAStageAddUp) {
  // Stage 0: segments 0 and 2; 3 + 3 against 1 + 1 + 1 + 1 + 2.
  EXPECT_EQ(divide_over_stages(loads({3, 1, 1, 3, 1, 1, 2}, 2, 2)), (Counts{1, 2, 1, 3}));
}

// Equal times: less memory, then early ends.
TEST(DivideOverStages, MemoryDecidesBetweenEqualTimes) {
  StageLoads two = loads({2, 0, 0, 2}, 2);
  for (LayerLoad& layer : two.layers) layer.weights = 0;
  EXPECT_EQ(divide_over_stages(two), (Counts{1, 3}));  // the first stage holds two of a layer
  two.in_flight = {1, 5};
  EXPECT_EQ(divide_over_stages(two), (Counts{3, 1}));
  two.in_flight = {0, 0};
  EXPECT_EQ(divide_over_stages(two), (Counts{1, 3}));
}

// Against all divisions of random layers, found one by one.
TEST(DivideOverStages, NoDivisionIsBetter) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const int64_t stages = 2 + static_cast<int64_t>(random() % 3),
                  chunks = 1 + static_cast<int64_t>(random() % 2), segments = stages * chunks,
                  layers = segments + static_cast<int64_t>(random() % 5);
    std::vector<double> times;
    for (int64_t i = 0; i < layers; ++i) times.push_back(1 + static_cast<double>(random() % 9));
    StageLoads given = loads(times, stages, chunks);
    given.head.time = static_cast<double>(random() % 9);
    const auto slowest = [&](const Counts& counts) {
      std::vector<double> of_stage(static_cast<size_t>(stages));
      int64_t next = 0;
      for (int64_t i = 0; i < segments; ++i)
        for (int64_t j = 0; j < counts[static_cast<size_t>(i)]; ++j)
          of_stage[static_cast<size_t>(i % stages)] += times[static_cast<size_t>(next++)];
      of_stage.back() += given.head.time;
      return std::ranges::max(of_stage);
    };
    double least = 1e9;
    Counts counts(static_cast<size_t>(segments), 1);
    const std::function<void(size_t, int64_t)> all = [&](size_t segment, int64_t left) {
      if (segment + 1 == counts.size()) {
        counts[segment] = left;
        least = std::min(least, slowest(counts));
        return;
      }
      for (int64_t here = 1; left - here >= segments - static_cast<int64_t>(segment) - 1; ++here) {
        counts[segment] = here;
        all(segment + 1, left - here);
      }
    };
    all(0, layers);
    EXPECT_NEAR(slowest(divide_over_stages(given)), least, 1e-9) << round;
  }
}

// Too many divisions to try all.
TEST(DivideOverStages, ManyLayersOfManySegmentsAreBalanced) {
  std::vector<double> times;
  for (int i = 0; i < 52; ++i) times.push_back(i % 7 == 0 ? 3 : 1);
  const Counts counts = divide_over_stages(loads(times, 4, 4));
  ASSERT_EQ(counts.size(), 16u);
  std::vector<double> of_stage(4);
  int64_t next = 0;
  for (size_t i = 0; i < counts.size(); ++i)
    for (int64_t j = 0; j < counts[i]; ++j) of_stage[i % 4] += times[static_cast<size_t>(next++)];
  EXPECT_LE(std::ranges::max(of_stage), 18);  // 68 in all
}

}  // namespace
}  // namespace megatron
