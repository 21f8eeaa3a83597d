#include "megatron/kernels/philox.h"

#include <gtest/gtest.h>

#include <vector>

#include "megatron/kernels/detail/philox_math.h"

namespace megatron {
namespace {

using Words = std::vector<uint32_t>;

Words rounds(Words counter, uint32_t k0, uint32_t k1) {
  philox_rounds(counter[0], counter[1], counter[2], counter[3], k0, k1);
  return counter;
}

// Known answers of philox4x32-10 in Random123's tests/kat_vectors.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(rounds({0, 0, 0, 0}, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(rounds({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffff, 0xffffffff),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(rounds({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, ManyBlocksEqualSingleOnes) {
  const uint64_t key = 0x299f31d0a4093822u, first = 0xfffffff0u;  // the low word of the counter overflows on the way
  Words words(4 * 41);
  philox_words_cpu(key, first, 7, 9, 41, words.data());
  for (uint64_t i = 0; i < 41; ++i) {
    const Words one = rounds({static_cast<uint32_t>(first + i), static_cast<uint32_t>((first + i) >> 32), 7, 9},
                             static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    for (uint64_t j = 0; j < 4; ++j) EXPECT_EQ(words[4 * i + j], one[j]) << i << " " << j;
  }
}

// The draws are part of a run's reproducibility: a change here changes every initialisation.
TEST(Philox, NormalDrawsAreFixed) {
  float draws[8];
  RandomFill fill;
  fill.key = 42;
  fill.out = draws;
  fill.rows = 1;
  fill.columns = 8;
  fill.row_elements = 8;
  fill_random_cpu(fill, 0, 1);
  float expected[8];
  Words words(8);
  philox_words_cpu(42, 0, 0, 0, 2, words.data());
  for (int i = 0; i < 4; ++i) normal_pair(words[2 * i], words[2 * i + 1], &expected[2 * i], &expected[2 * i + 1]);
  const uint32_t frozen[8] = {0xbf785e5c, 0x3e46ace8, 0xbf9e28d2, 0x3ff6433c,
                              0xbd95e033, 0x3e0e7a13, 0xbf8da734, 0x3ea742fe};
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(bits_from_float(draws[i]), bits_from_float(expected[i]));
    EXPECT_EQ(bits_from_float(draws[i]), frozen[i]);
  }
}

TEST(Philox, DropThresholdCoversTheEnds) {
  EXPECT_EQ(drop_threshold(0.0), 0u);
  EXPECT_EQ(drop_threshold(0.5), 0x80000000u);
  EXPECT_EQ(drop_threshold(1.0), 0x100000000u);
}

}  // namespace
}  // namespace megatron
