// Document, sample, shuffle and blending indices against Megatron-LM's test vectors and the
// goldens.
#include "megatron/datasets/gpt/gpt_indices.h"

#include <nlohmann/json.hpp>

#include "megatron/datasets/blend.h"
#include "megatron/datasets/blended_dataset.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using Longs = std::vector<int64_t>;

Longs values_of(const IndexArray& array) {
  Longs out;
  for (int64_t i = 0; i < array.size(); ++i) out.push_back(array[i]);
  return out;
}

IndexArray array_of(const std::vector<int32_t>& values) {
  IndexArray array;
  array.narrow = values;
  return array;
}

Longs shuffle_of(const GPTIndices& indices) {
  return indices.shuffle_wide.empty()
             ? Longs(indices.shuffle_narrow.begin(), indices.shuffle_narrow.end())
             : indices.shuffle_wide;
}

const std::vector<int32_t> kLengths = {5, 3, 7, 4};

TEST(SampleIndex, EqualsMegatronVectors) {
  EXPECT_EQ(values_of(build_sample_index(array_of({2, 0, 3, 1}), kLengths, 4, 1, true, 1)),
            (Longs{0, 0, 0, 4, 1, 1, 2, 0, 3, 0}));
  EXPECT_EQ(values_of(build_sample_index(array_of({2, 0, 3, 1}), kLengths, 4, 1, false, 1)),
            (Longs{0, 0, 0, 4, 1, 1, 2, 0, 3, 0, 3, 2}));
  EXPECT_EQ(
      values_of(build_sample_index(array_of({2, 1, 2, 0, 0, 1, 3, 3}), kLengths, 4, 1, true, 1)),
      (Longs{0, 0, 0, 4, 1, 1, 2, 2, 2, 6, 3, 3, 4, 2, 5, 1, 6, 2, 7, 2}));
}

GPTIndices whole_index(int64_t num_samples) {
  return build_gpt_indices({.first = 0,
                            .last = 4,
                            .lengths = kLengths,
                            .sequence_length = 4,
                            .num_samples = num_samples,
                            .seed = 1234,
                            .threads = 1});
}

TEST(GPTIndices, EqualMegatronVectorWithoutSeparateEpoch) {
  const GPTIndices indices = whole_index(8);
  EXPECT_EQ(indices.num_epochs, 2);
  EXPECT_FALSE(indices.separate_final_epoch);
  EXPECT_EQ(values_of(indices.document_index), (Longs{2, 1, 2, 0, 0, 1, 3, 3}));
  EXPECT_EQ(shuffle_of(indices), (Longs{6, 4, 0, 5, 3, 2, 8, 7, 1}));
}

TEST(GPTIndices, EqualMegatronVectorWithSeparateEpoch) {
  const GPTIndices indices = whole_index(6);
  EXPECT_EQ(indices.num_epochs, 2);
  EXPECT_TRUE(indices.separate_final_epoch);
  EXPECT_EQ(values_of(indices.document_index), (Longs{0, 1, 2, 3, 1, 2, 3, 0}));
  EXPECT_EQ(values_of(indices.sample_index),
            (Longs{0, 0, 0, 4, 2, 0, 2, 4, 3, 1, 4, 1, 5, 2, 5, 6, 6, 3, 7, 3}));
  EXPECT_EQ(shuffle_of(indices), (Longs{0, 2, 3, 1, 4, 8, 7, 6, 5}));
}

TEST(GPTIndices, EqualNumpyOnGoldensForAnyNumberOfThreads) {
  for (const auto& spec : goldens()["gpt"]) {
    const auto lengths = golden_lengths(spec);
    for (const int threads : {1, 3}) {
      GPTIndexInputs inputs{.first = spec["first"],
                            .last = spec["last"],
                            .lengths = lengths,
                            .sequence_length = spec["sequence_length"],
                            .extra = spec["extra"],
                            .seed = spec["seed"],
                            .drop_last = spec["drop_last"],
                            .threads = threads};
      if (!spec["num_samples"].is_null()) inputs.num_samples = spec["num_samples"].get<int64_t>();
      const GPTIndices indices = build_gpt_indices(inputs);
      SCOPED_TRACE(spec["seed"].dump());
      EXPECT_EQ(indices.num_epochs, spec["epochs"].get<int64_t>());
      EXPECT_EQ(indices.separate_final_epoch, spec["separate"].get<bool>());
      expect_entry(values_of(indices.document_index), spec["document_index"]);
      expect_entry(values_of(indices.sample_index), spec["sample_index"]);
      expect_entry(shuffle_of(indices), spec["shuffle_index"]);
    }
  }
}

// Lengths near 2^31 whose sum does not fit 32 bits: positions must be computed in 64 bits.
TEST(SampleIndex, CountsTokensIn64Bits) {
  const std::vector<int32_t> lengths = {2000000000, 2000000000, 2000000000};
  const IndexArray rows = build_sample_index(array_of({1, 0, 2}), lengths, 1000000000, 1, true, 1);
  EXPECT_EQ(values_of(rows),
            (Longs{0, 0, 0, 1000000000, 1, 0, 1, 1000000000, 2, 0, 2, 1000000000}));
}

TEST(NumEpochs, RefusesMoreTokensThanCanBeCounted) {
  EXPECT_EQ(num_epochs_for(19, 4, 1, 8), 2);
  EXPECT_EQ(num_epochs_for(19, 4, 1, std::nullopt), 1);
  EXPECT_EQ(num_epochs_for(int64_t{3} << 40, 4096, 1, int64_t{1} << 32), 6);
  EXPECT_THAT(error_of([] { num_epochs_for(19, 1 << 20, 1, int64_t{1} << 50); }),
              ::testing::HasSubstr("more tokens than can be counted"));
}

std::vector<std::pair<int, int64_t>> pairs_of(const BlendIndices& indices) {
  std::vector<std::pair<int, int64_t>> out;
  for (size_t i = 0; i < indices.dataset_ids.size(); ++i)
    out.emplace_back(indices.dataset_ids[i], indices.sample_ids[i]);
  return out;
}

TEST(BlendingIndices, EqualMegatronVectors) {
  using Pairs = std::vector<std::pair<int, int64_t>>;
  EXPECT_EQ(pairs_of(build_blending_indices(std::vector{0.3, 0.5, 0.2}, 12)), (Pairs{{1, 0},
                                                                                     {0, 0},
                                                                                     {2, 0},
                                                                                     {1, 1},
                                                                                     {0, 1},
                                                                                     {1, 2},
                                                                                     {2, 1},
                                                                                     {1, 3},
                                                                                     {0, 2},
                                                                                     {1, 4},
                                                                                     {0, 3},
                                                                                     {1, 5}}));
  EXPECT_EQ(
      pairs_of(build_exhaustive_blending_indices(Longs{3, 5, 2})),
      (Pairs{{1, 0}, {0, 0}, {2, 0}, {1, 1}, {0, 1}, {1, 2}, {2, 1}, {1, 3}, {0, 2}, {1, 4}}));
}

TEST(BlendingIndices, EqualPythonOnGoldens) {
  for (const auto& spec : goldens()["blend"]["weighted"]) {
    const auto weights = spec["weights"].get<std::vector<double>>();
    const auto normal = normalize_weights(weights);
    for (size_t i = 0; i < normal.size(); ++i)
      ASSERT_EQ(normal[i], std::strtod(spec["normalized"][i].get<std::string>().c_str(), nullptr))
          << i;
    EXPECT_EQ(member_sizes(normal, spec["size"], 0.005), spec["member_sizes"].get<Longs>());
    const BlendIndices indices = build_blending_indices(normalize_weights(normal), spec["total"]);
    expect_entry(Longs(indices.dataset_ids.begin(), indices.dataset_ids.end()),
                 spec["dataset_index"]);
    expect_entry(indices.sample_ids, spec["sample_index"]);
  }
  for (const auto& spec : goldens()["blend"]["exhaustive"]) {
    const BlendIndices indices = build_exhaustive_blending_indices(spec["sizes"].get<Longs>());
    expect_entry(Longs(indices.dataset_ids.begin(), indices.dataset_ids.end()),
                 spec["dataset_index"]);
    expect_entry(indices.sample_ids, spec["sample_index"]);
  }
}

TEST(BlendingIndices, EveryPrefixIsWithinOneSampleOfTheWeights) {
  const std::vector<double> weights = {0.1, 0.25, 0.65};
  const BlendIndices indices = build_blending_indices(weights, 5000);
  Longs counts(3);
  for (size_t i = 0; i < indices.dataset_ids.size(); ++i) {
    ++counts[indices.dataset_ids[i]];
    for (int d = 0; d < 3; ++d)
      ASSERT_LE(std::abs(weights[d] * static_cast<double>(i + 1) - static_cast<double>(counts[d])),
                1.5);
  }
}

TEST(Split, RangesEqualPythonOnGoldens) {
  for (const auto& spec : goldens()["split"]) {
    const SplitMatrix matrix = parse_split(spec["text"]);
    for (int i = 0; i < kNumSplits; ++i) {
      const auto& expected = spec["ranges"][i];
      ASSERT_EQ(matrix[i].has_value(), !expected.is_null()) << spec.dump();
      if (!matrix[i]) continue;
      const auto [first, last] = split_range(*matrix[i], spec["count"]);
      EXPECT_EQ((Longs{first, last}), expected.get<Longs>()) << spec.dump();
    }
  }
}

TEST(Split, RefusesNonsense) {
  EXPECT_THAT(error_of([] { parse_split("0,0,0"); }),
              ::testing::HasSubstr("has shares that sum to 0"));
  EXPECT_THAT(error_of([] { parse_split(""); }), ::testing::HasSubstr("has shares that sum to 0"));
  EXPECT_THAT(error_of([] { parse_split("1,2,3,4"); }),
              ::testing::HasSubstr("does not read as up to three shares"));
  EXPECT_THAT(error_of([] { parse_split("1.2.3"); }),
              ::testing::HasSubstr("\"1.2.3\" is no number"));
}

}  // namespace
}  // namespace megatron::testing_datasets
