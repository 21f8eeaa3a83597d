#include "megatron/base/seed.h"

#include <gtest/gtest.h>

#include <set>

namespace megatron {
namespace {

// Computed by an independent program from the definition in seed.h. Stored runs depend on them.
TEST(DeriveSeed, IsFixedForEver) {
  EXPECT_EQ(derive_seed(0, ""), 0xe587d3dff9e92ed0u);
  EXPECT_EQ(derive_seed(1234, "weights"), 0x7d9cc9e5efaf5747u);
  EXPECT_EQ(derive_seed(1234, "dropout", {0}), 0xe3bc3c5648c3c391u);
  EXPECT_EQ(derive_seed(1234, "dropout", {0, 0}), 0x7efaea49e549f43fu);
  EXPECT_EQ(derive_seed(~uint64_t{0},
                        "donn\xc3\xa9"
                        "es",
                        {1, 2, 3}),
            0x3863f6982e849243u);
}

TEST(DeriveSeed, DistinguishesEveryPart) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 10; ++seed)
    for (const char* purpose : {"a", "b", "ab"})
      for (uint64_t i = 0; i < 10; ++i)
        for (uint64_t j = 0; j < 10; ++j) seeds.insert(derive_seed(seed, purpose, {i, j}));
  EXPECT_EQ(seeds.size(), 10u * 3 * 10 * 10);
}

}  // namespace
}  // namespace megatron
