#include "megatron/training/dynamic_context/dynamic_context_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>
#include <set>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using testing::HasSubstr;

struct Drawn {
  std::vector<int64_t> lengths;
  DynamicContextOptions options;
};

// Lengths as documents have them: many short ones, few long ones.
Drawn draw(std::mt19937_64& random, int64_t num_ranks) {
  Drawn drawn;
  drawn.options.num_ranks = num_ranks;
  drawn.options.max_tokens = 1 + static_cast<int64_t>(random() % 512);
  drawn.options.linear_work = 1000;
  drawn.options.attention_work = static_cast<double>(random() % 3);
  const int64_t longest = drawn.options.max_tokens *
                          static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(num_ranks)));
  std::lognormal_distribution<double> law(4.0, 1.5);
  const size_t count = random() % 200;
  for (size_t i = 0; i < count; ++i)
    drawn.lengths.push_back(std::clamp<int64_t>(static_cast<int64_t>(law(random)), 1, longest));
  return drawn;
}

double work(const Drawn& drawn, const PlacedDocument& document) {
  const double length = static_cast<double>(drawn.lengths[static_cast<size_t>(document.index)]);
  return length * (drawn.options.linear_work + drawn.options.attention_work * length) /
         static_cast<double>(document.width);
}

TEST(DynamicContextPlan, WidthsAreTheSmallestPowersOfTwoThatHoldTheDocument) {
  EXPECT_EQ(context_width(1, 100), 1);
  EXPECT_EQ(context_width(100, 100), 1);
  EXPECT_EQ(context_width(101, 100), 2);
  EXPECT_EQ(context_width(201, 100), 4);
  EXPECT_EQ(context_width(401, 100), 8);
}

TEST(DynamicContextPlan, EveryDocumentOnceOnABlockOfItsWidth) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 500; ++i) {
    const Drawn drawn = draw(random, 1 + static_cast<int64_t>(random() % 40));
    const DynamicContextPlan plan = plan_dynamic_context(drawn.lengths, drawn.options);
    std::set<int64_t> seen;
    std::vector<double> load(static_cast<size_t>(drawn.options.num_ranks), 0.0);
    for (const PlacedDocument& d : plan.documents) {
      EXPECT_TRUE(seen.insert(d.index).second);
      EXPECT_EQ(d.width, context_width(drawn.lengths[static_cast<size_t>(d.index)],
                                       drawn.options.max_tokens));
      EXPECT_EQ(d.first_rank % d.width, 0);
      EXPECT_LE(d.first_rank + d.width, drawn.options.num_ranks);
      // Nobody waits inside of a block: its ranks are free at the same time.
      const double free_at = load[static_cast<size_t>(d.first_rank)];
      for (int64_t rank = d.first_rank; rank < d.first_rank + d.width; ++rank) {
        EXPECT_EQ(load[static_cast<size_t>(rank)], free_at);
        load[static_cast<size_t>(rank)] += work(drawn, d);
      }
    }
    EXPECT_EQ(seen.size(), drawn.lengths.size());
    EXPECT_EQ(plan.load, load);
    // All ranks make the same plan.
    EXPECT_EQ(plan_dynamic_context(drawn.lengths, drawn.options).documents, plan.documents);
  }
}

// The bound of list scheduling: the fullest rank has at most its share of everything and one
// document more.
TEST(DynamicContextPlan, LoadsAreBalanced) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 300; ++i) {
    const int64_t ranks = int64_t{1} << (random() % 7);
    const Drawn drawn = draw(random, ranks);
    const DynamicContextPlan plan = plan_dynamic_context(drawn.lengths, drawn.options);
    double all = 0, longest = 0;
    for (const PlacedDocument& d : plan.documents) {
      all += work(drawn, d) * static_cast<double>(d.width);
      longest = std::max(longest, work(drawn, d));
    }
    EXPECT_LE(plan.longest, (all / static_cast<double>(ranks) + longest) * (1 + 1e-12));
  }
}

TEST(DynamicContextPlan, ADocumentThatNoBlockHoldsIsRefused) {
  const std::vector<int64_t> lengths = {10, 801};
  DynamicContextOptions options;
  options.num_ranks = 12;
  options.max_tokens = 100;
  try {
    plan_dynamic_context(lengths, options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr(
            "a document of 801 tokens needs 16 ranks with 100 tokens each, and the widest power of "
            "two among 12 is 8\nhint: raise --max-seqlen-per-dp-cp-rank to 101"));
  }
}

}  // namespace
}  // namespace megatron
