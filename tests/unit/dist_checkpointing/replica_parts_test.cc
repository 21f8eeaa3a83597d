#include "megatron/dist_checkpointing/replica_parts.h"

#include <gtest/gtest.h>

#include <random>

namespace megatron {
namespace {

// Every element is in one part, parts rise, and no replica has more than its share of bytes but for
// the element at each cut.
void expect_even(const std::vector<TensorSize>& tensors, int replicas) {
  const std::vector<ReplicaPart> parts = divide_among_replicas(tensors, replicas);
  std::vector<int64_t> bytes(static_cast<size_t>(replicas)), next(tensors.size());
  int64_t total = 0;
  int last = 0;
  for (const ReplicaPart& part : parts) {
    EXPECT_EQ(part.begin, next[part.tensor]);
    EXPECT_LE(part.begin, part.end);
    EXPECT_LT(part.replica, replicas);
    if (part.begin == part.end) {
      EXPECT_EQ(tensors[part.tensor].elements, 0);
      continue;
    }
    EXPECT_GE(part.replica, last);
    last = part.replica;
    next[part.tensor] = part.end;
    bytes[static_cast<size_t>(part.replica)] +=
        (part.end - part.begin) * tensors[part.tensor].element_bytes;
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(next[i], tensors[i].elements);
    total += tensors[i].elements * tensors[i].element_bytes;
  }
  for (const int64_t part : bytes) EXPECT_LE(part, total / replicas + 8);
}

TEST(ReplicaParts, AreEvenAndCoverEverything) {
  EXPECT_EQ(divide_among_replicas(std::vector<TensorSize>{{10, 2}, {0, 4}, {5, 4}}, 1),
            (std::vector<ReplicaPart>{{0, 0, 0, 10}, {1, 0, 0, 0}, {2, 0, 0, 5}}));
  EXPECT_EQ(divide_among_replicas(std::vector<TensorSize>{{10, 2}, {5, 4}}, 4),
            (std::vector<ReplicaPart>{{0, 0, 0, 5}, {0, 1, 5, 10}, {1, 2, 0, 3}, {1, 3, 3, 5}}));
  EXPECT_TRUE(divide_among_replicas({}, 3).empty());
  std::mt19937_64 random(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<TensorSize> tensors(random() % 12);
    for (TensorSize& tensor : tensors)
      tensor = {random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 5000),
                int64_t{1} << random() % 4};
    expect_even(tensors, static_cast<int>(1 + random() % 40));
  }
  expect_even({{int64_t{1} << 55, 8}, {int64_t{1} << 54, 2}}, 16384);
}

}  // namespace
}  // namespace megatron
