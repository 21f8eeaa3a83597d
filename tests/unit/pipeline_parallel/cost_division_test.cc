#include "megatron/pipeline_parallel/cost_division.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace megatron {
namespace {

using Counts = std::vector<int64_t>;

double most_costly(const std::vector<double>& layers, double head, const Counts& counts) {
  double most = 0;
  size_t next = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    double all = i + 1 == counts.size() ? head : 0;
    for (int64_t k = 0; k < counts[i]; ++k) all += layers[next++];
    most = std::max(most, all);
  }
  return most;
}

// The least that any division costs.
double least(const std::vector<double>& layers, double head, int64_t segments, Counts counts = {},
             int64_t used = 0) {
  const int64_t rest = std::ssize(layers) - used;
  if (segments == 1) {
    counts.push_back(rest);
    return most_costly(layers, head, counts);
  }
  double best = HUGE_VAL;
  for (int64_t own = 1; own <= rest - segments + 1; ++own) {
    Counts with = counts;
    with.push_back(own);
    best = std::min(best, least(layers, head, segments - 1, with, used + own));
  }
  return best;
}

TEST(CostDivision, EqualLayersAreDividedEvenly) {
  EXPECT_EQ(divide_by_cost(std::vector<double>(8, 1.0), 0, 4), (Counts{2, 2, 2, 2}));
  EXPECT_EQ(divide_by_cost(std::vector<double>(9, 1.0), 0, 4), (Counts{2, 2, 2, 3}));
  EXPECT_EQ(divide_by_cost({1, 1, 1}, 0, 3), (Counts{1, 1, 1}));
  EXPECT_EQ(divide_by_cost({1, 2}, 5, 1), (Counts{2}));
}

TEST(CostDivision, HeadAndCostlyLayersCount) {
  EXPECT_EQ(divide_by_cost(std::vector<double>(8, 1.0), 2, 2), (Counts{5, 3}));
  EXPECT_EQ(divide_by_cost(std::vector<double>(6, 1.0), 10, 3), (Counts{2, 3, 1}));
  EXPECT_EQ(divide_by_cost({4, 4, 1, 1, 1, 1}, 0, 3), (Counts{1, 1, 4}));
}

TEST(CostDivision, NoDivisionIsBetter) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    std::vector<double> layers;
    for (size_t k = 0; k < 2 + random() % 9; ++k) layers.push_back(1.0 + random() % 5);
    const auto segments = static_cast<int64_t>(1 + random() % layers.size());
    const double head = static_cast<double>(random() % 6);
    const Counts counts = divide_by_cost(layers, head, segments);
    ASSERT_EQ(std::ssize(counts), segments);
    EXPECT_GE(*std::ranges::min_element(counts), 1);
    EXPECT_DOUBLE_EQ(most_costly(layers, head, counts), least(layers, head, segments));
  }
}

}  // namespace
}  // namespace megatron
