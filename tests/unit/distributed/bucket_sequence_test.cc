#include "megatron/distributed/bucket_sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace megatron {
namespace {

std::vector<int> drain(BucketSequence& sequence) {
  std::vector<int> buckets;
  while (const std::optional<int> bucket = sequence.next_ready()) buckets.push_back(*bucket);
  return buckets;
}

std::vector<int> flush(BucketSequence& sequence) {
  std::vector<int> buckets;
  while (const std::optional<int> bucket = sequence.next_left()) buckets.push_back(*bucket);
  return buckets;
}

TEST(BucketSequence, ABucketWaitsForAllUsesAndForTheBucketsBefore) {
  BucketSequence sequence({0, 1}, {{0, 1}, {2}}, {1, 2, 1});
  sequence.restart(1, 1);
  EXPECT_FALSE(sequence.report(2));
  EXPECT_TRUE(drain(sequence).empty()) << "bucket 1 is complete, but comes after bucket 0";
  EXPECT_FALSE(sequence.report(0));
  EXPECT_FALSE(sequence.report(1));
  EXPECT_TRUE(drain(sequence).empty()) << "parameter 1 is used twice";
  EXPECT_FALSE(sequence.report(1));
  EXPECT_EQ(drain(sequence), (std::vector<int>{0, 1}));
  EXPECT_TRUE(flush(sequence).empty());
}

TEST(BucketSequence, OneRoundOfSeveralPassesTakesThemAll) {
  BucketSequence sequence({0}, {{0}}, {1});
  sequence.restart(1, 3);
  for (int pass = 0; pass < 3; ++pass) {
    EXPECT_TRUE(drain(sequence).empty());
    EXPECT_FALSE(sequence.report(0));
  }
  EXPECT_EQ(drain(sequence), (std::vector<int>{0}));
  EXPECT_TRUE(sequence.report(0)) << "a fourth pass was not announced";
}

TEST(BucketSequence, UnusedParametersAreFlushed) {
  BucketSequence sequence({1, 0, 2}, {{0}, {1}, {}}, {1, 1, 1});
  sequence.restart(2, 1);
  EXPECT_FALSE(sequence.report(1));
  EXPECT_EQ(drain(sequence), (std::vector<int>{1}));
  EXPECT_EQ(flush(sequence), (std::vector<int>{0, 2, 1, 0, 2}));
  EXPECT_TRUE(sequence.report(2)) << "it is not trained";
  sequence.restart(1, 1);
  EXPECT_EQ(flush(sequence), (std::vector<int>{1, 0, 2})) << "a step begins anew";
}

// Whatever comes first and whatever never comes: every rank reduces the same buckets in the same
// order. Reports of a later pass may come before those of an earlier one (weight gradients that
// wait).
TEST(BucketSequence, OrderDoesNotDependOnReadiness) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const int passes = 1 + trial % 4;
    BucketSequence sequence({2, 0, 1}, {{0, 1}, {2, 3}, {4}}, {1, 2, 1, 1, 1});
    sequence.restart(passes, 1);
    std::vector<int> reports;
    for (int pass = 0; pass < passes; ++pass) reports.insert(reports.end(), {0, 1, 1, 2, 3, 4});
    std::shuffle(reports.begin(), reports.end(), random);
    if (trial % 3 == 0) reports.resize(reports.size() / 2);
    std::vector<int> order;
    for (int parameter : reports) {
      EXPECT_FALSE(sequence.report(parameter));
      for (int bucket : drain(sequence)) order.push_back(bucket);
    }
    if (trial % 3 != 0) {
      EXPECT_EQ(order.size(), 3u * passes) << "everything was ready";
    }
    for (int bucket : flush(sequence)) order.push_back(bucket);
    std::vector<int> expected;
    for (int pass = 0; pass < passes; ++pass) expected.insert(expected.end(), {2, 0, 1});
    EXPECT_EQ(order, expected);
  }
}

TEST(BucketSequence, NothingIsLegal) {
  BucketSequence sequence({}, {}, {});
  sequence.restart(1, 1);
  EXPECT_FALSE(sequence.next_ready().has_value());
  EXPECT_FALSE(sequence.next_left().has_value());
}

}  // namespace
}  // namespace megatron
