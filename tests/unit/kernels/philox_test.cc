#include "megatron/kernels/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "megatron/kernels/detail/philox_math.h"
#include "tests/unit/kernels/testing.h"

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
  // The low word of the counter overflows on the way
  const uint64_t key = 0x299f31d0a4093822u, first = 0xfffffff0u;
  Words words(4 * 41);
  philox_words_cpu(key, first, 7, 9, 41, words.data());
  for (uint64_t i = 0; i < 41; ++i) {
    const Words one =
        rounds({static_cast<uint32_t>(first + i), static_cast<uint32_t>((first + i) >> 32), 7, 9},
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
  for (int i = 0; i < 4; ++i)
    normal_pair(words[2 * i], words[2 * i + 1], &expected[2 * i], &expected[2 * i + 1]);
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

// The word of element e: e % 4 of block e / 4 above `high`, with the other two counters.
uint32_t word_at(uint64_t key, uint64_t e, uint32_t high, uint32_t c2, uint32_t c3) {
  const Words block =
      rounds({static_cast<uint32_t>(e / 4), static_cast<uint32_t>(e / 4 >> 32) + high, c2, c3},
             static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  return block[e % 4];
}

class RandomKernels : public FloatingTypes {};

// A part of a larger tensor, at odd places; longer than one run of the kernel.
TEST_P(RandomKernels, FillsByPlace) {
  constexpr int64_t kRows = 3, kColumns = 601;
  for (const bool normal : {true, false}) {
    for (const int64_t offset : {4, 5, 6, 7}) {
      Elements out(GetParam(), kRows * kColumns);
      RandomFill fill;
      fill.normal = normal;
      fill.a = normal ? 0.5 : -1.0;
      fill.b = 2.0;
      fill.key = 0x123456789abcdef0u;
      fill.dtype = GetParam();
      fill.out = out.data();
      fill.rows = kRows;
      fill.columns = kColumns;
      fill.first_row = 70;
      fill.row_elements = 1001;
      fill.column_offset = offset;
      fill_random_cpu(fill, 0, 1);
      EXPECT_TRUE(std::isnan(out.values().back()));
      fill_random_cpu(fill, 1, kRows);
      Doubles expected;
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t i = 0; i < kColumns; ++i) {
          const uint64_t e = static_cast<uint64_t>((70 + row) * 1001 + offset + i);
          const auto unit = [&](uint64_t at) {
            return word_at(fill.key, at, 0, 0, 0) / 4294967296.0;
          };
          if (normal) {  // Box-Muller over pairs of elements
            const float u = static_cast<float>(unit(e / 2 * 2) + 0.5 / 4294967296.0);
            const double radius = std::sqrt(-2 * std::log(double{u}));
            const double angle = 2 * M_PI * unit(e / 2 * 2 + 1);
            expected.push_back(0.5 * radius * (e % 2 == 0 ? std::cos(angle) : std::sin(angle)));
          } else {
            expected.push_back(-1.0 + 3.0 * std::floor(unit(e) * 16777216.0) / 16777216.0);
          }
        }
      }
      // The draws themselves are fp32.
      expect_near(out, expected, std::max(tolerance(GetParam()), 1e-6),
                  normal ? "normal" : "uniform");
    }
  }
}

void test_dropout(DType x_type, DType out_type, double p, bool with_residual) {
  constexpr int64_t kSequence = 3, kBatch = 2, kFeatures = 601,
                    kCount = kSequence * kBatch * kFeatures;
  const std::vector<int64_t> sample = {5, int64_t{1} << 33}, position = {7, 3, 4};
  const Elements x(x_type, normal_values(kCount, 1)), residual(out_type, normal_values(kCount, 2));
  Elements out(out_type, kCount);
  Dropout dropout;
  dropout.p = p;
  dropout.key = 99;
  dropout.sequence = kSequence;
  dropout.batch = kBatch;
  dropout.features = kFeatures;
  dropout.sample = sample.data();
  dropout.position = position.data();
  dropout.x_dtype = x_type;
  dropout.x = x.data();
  dropout.out_dtype = out_type;
  dropout.residual = with_residual ? residual.data() : nullptr;
  dropout.out = out.data();
  dropout_cpu(dropout, 0, 2);
  EXPECT_TRUE(std::isnan(out.values().back()));
  dropout_cpu(dropout, 2, kSequence * kBatch);
  Doubles expected;
  for (int64_t row = 0; row < kSequence * kBatch; ++row) {
    const uint64_t who = static_cast<uint64_t>(sample[row % kBatch]);
    for (int64_t i = 0; i < kFeatures; ++i) {
      const uint32_t word =
          word_at(99, static_cast<uint64_t>(i), static_cast<uint32_t>(position[row / kBatch]),
                  static_cast<uint32_t>(who), static_cast<uint32_t>(who >> 32));
      const int64_t at = row * kFeatures + i;
      const double kept = word < p * 4294967296.0 ? 0.0 : x[at] / (1 - p);
      expected.push_back(kept + (with_residual ? residual[at] : 0.0));
    }
  }
  expect_near(out, expected, tolerance(out_type), "dropout " + std::to_string(p));
}

TEST_P(RandomKernels, DropoutByPlace) {
  for (const DType out_type : {GetParam(), DType::kFloat32}) {
    for (const double p : {0.0, 0.25, 1.0}) {
      test_dropout(GetParam(), out_type, p, true);
      test_dropout(GetParam(), out_type, p, false);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RandomKernels, kFloatingTypes, type_name);

// Keys in a row take a faster way than keys in any order.
TEST(AttentionDropoutKernel, MaskByPlace) {
  constexpr int64_t kBatch = 2, kHeads = 3, kQueries = 2, kFirstHead = 5;
  const std::vector<int64_t> sample = {4, (int64_t{1} << 40) + 1}, query = {9, 2};
  std::vector<int64_t> straight, mixed;
  for (int64_t i = 0; i < 601; ++i) {
    straight.push_back(i + 3);
    mixed.push_back((i * 37) % 601);
  }
  for (const std::vector<int64_t>& keys : {straight, mixed}) {
    for (const double p : {0.0, 0.5, 1.0}) {
      const int64_t count = static_cast<int64_t>(keys.size()), rows = kBatch * kHeads * kQueries;
      std::vector<float> out(static_cast<size_t>(rows * count), -1.0f);
      AttentionDropout dropout;
      dropout.p = p;
      dropout.key = 77;
      dropout.batch = kBatch;
      dropout.heads = kHeads;
      dropout.queries = kQueries;
      dropout.keys = count;
      dropout.first_head = kFirstHead;
      dropout.sample = sample.data();
      dropout.query_position = query.data();
      dropout.key_position = keys.data();
      dropout.out = out.data();
      attention_dropout_cpu(dropout, 0, 5);
      EXPECT_EQ(out[static_cast<size_t>(5 * count)], -1.0f);
      attention_dropout_cpu(dropout, 5, rows);
      int64_t wrong = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const uint64_t who = static_cast<uint64_t>(sample[row / kQueries / kHeads]);
        const uint64_t head = static_cast<uint64_t>(kFirstHead + row / kQueries % kHeads);
        for (int64_t i = 0; i < count; ++i) {
          const uint32_t word = word_at(
              77, static_cast<uint64_t>(keys[i]), static_cast<uint32_t>(query[row % kQueries]),
              static_cast<uint32_t>(who), static_cast<uint32_t>((who >> 32) + head * 65536));
          const float expected = word < p * 4294967296.0 ? 0.0f : static_cast<float>(1 / (1 - p));
          wrong += out[static_cast<size_t>(row * count + i)] != expected;
        }
      }
      EXPECT_EQ(wrong, 0) << "p " << p << ", first key " << keys[0];
    }
  }
}

}  // namespace
}  // namespace megatron
