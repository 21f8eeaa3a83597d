// Preference pairs as neighbouring samples: loss masks, the order of epochs, errors.
#include "megatron/datasets/tuning/preference_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::ElementsAre;

std::shared_ptr<const std::vector<PreferencePair>> pairs(int count) {
  auto out = std::make_shared<std::vector<PreferencePair>>();
  for (int i = 0; i < count; ++i)
    out->push_back(
        {{100 * i + 1, 100 * i + 2}, {100 * i + 3, 100 * i + 4, 100 * i + 5}, {100 * i + 6}});
  return out;
}

PreferenceDatasetConfig preference_config(int64_t length) {
  PreferenceDatasetConfig config;
  config.sequence_length = length;
  config.pad = 9;
  config.description = "{}";
  return config;
}

TEST(PreferenceDataset, LabelsCountWhereTheyAreOfTheResponse) {
  const PreferenceDataset set(pairs(1), 0, preference_config(6));
  ASSERT_EQ(set.size(), 2);
  const Sample chosen = set.sample(0), rejected = set.sample(1);
  EXPECT_THAT(chosen.get<int64_t>("tokens"), ElementsAre(1, 2, 3, 4, 5, 9));
  EXPECT_THAT(chosen.get<int64_t>("labels"), ElementsAre(2, 3, 4, 5, 9, 9));
  EXPECT_THAT(chosen.get<float>("loss_mask"), ElementsAre(0, 1, 1, 1, 0, 0));
  EXPECT_THAT(chosen.get<int64_t>("position_ids"), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(chosen.document_starts, ElementsAre(0));
  EXPECT_THAT(rejected.get<int64_t>("tokens"), ElementsAre(1, 2, 6, 9, 9, 9));
  EXPECT_THAT(rejected.get<float>("loss_mask"), ElementsAre(0, 1, 0, 0, 0, 0));
}

TEST(PreferenceDataset, ASequenceMayHaveOneTokenMoreThanASample) {
  const PreferenceDataset set(pairs(1), 0, preference_config(4));
  const Sample chosen = set.sample(0);
  EXPECT_THAT(chosen.get<int64_t>("tokens"), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(chosen.get<int64_t>("labels"), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(chosen.get<float>("loss_mask"), ElementsAre(0, 1, 1, 1));
}

TEST(PreferenceDataset, EachEpochHasEveryPairOnceInAnOrderOfItsOwn) {
  const int count = 20;
  const PreferenceDataset set(pairs(count), 6 * count, preference_config(6));
  std::vector<std::vector<int64_t>> epochs(3);
  for (int64_t i = 0; i < set.size(); i += 2) {
    const int64_t first = set.sample(i).get<int64_t>("tokens")[0];
    EXPECT_EQ(set.sample(i + 1).get<int64_t>("tokens")[0], first) << "both responses of one prompt";
    epochs[static_cast<size_t>(i / (2 * count))].push_back(first);
  }
  for (const auto& epoch : epochs)
    EXPECT_EQ(std::set<int64_t>(epoch.begin(), epoch.end()).size(), 20U);
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  PreferenceDatasetConfig other = preference_config(6);
  other.seed = 1;
  EXPECT_NE(PreferenceDataset(pairs(count), 6 * count, other).fingerprint(), set.fingerprint());
  EXPECT_EQ(PreferenceDataset(pairs(count), 6 * count, preference_config(6)).fingerprint(),
            set.fingerprint());
}

TEST(PreferenceDataset, RefusesWhatDoesNotFit) {
  EXPECT_EQ(error_of([] { PreferenceDataset(pairs(0), 0, preference_config(6)); }),
            "there are no pairs of responses");
  EXPECT_EQ(error_of([] { PreferenceDataset(pairs(1), 3, preference_config(6)); }),
            "3 samples are no whole number of pairs");
  EXPECT_EQ(error_of([] { PreferenceDataset(pairs(1), 2, preference_config(3)); }),
            "pair 0: prompt and response have 5 tokens, samples of 3 have room for 4");
  EXPECT_EQ(error_of([] {
              PreferenceDataset(
                  std::make_shared<std::vector<PreferencePair>>(1, PreferencePair{{1}, {}, {2}}), 0,
                  preference_config(6));
            }),
            "pair 0: prompt and responses must have tokens");
}

}  // namespace
}  // namespace megatron
