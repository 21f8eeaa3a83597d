// Datasets from flags: the blend grammar, splits, blends, validation sets, and errors.
#include "megatron/datasets/dataset_builder.h"

#include <set>

#include "megatron/base/files.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/blended_dataset.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Strings = std::vector<std::string>;
using Longs = std::vector<int64_t>;

TEST(Blend, ReadsMegatronsGrammar) {
  EXPECT_EQ(parse_blend(Strings{"a"}, "--data-path").prefixes, (Strings{"a"}));
  EXPECT_EQ(parse_blend(Strings{"a", "b"}, "--data-path").prefixes, (Strings{"a", "b"}));
  EXPECT_FALSE(parse_blend(Strings{"a", "b"}, "--data-path").weights);
  EXPECT_EQ(parse_blend(Strings{"1", "a", "b"}, "--data-path").prefixes, (Strings{"1", "a", "b"}));
  const Blend blend = parse_blend(Strings{"0.3", "a", "7e-1", "b"}, "--data-path");
  EXPECT_EQ(blend.prefixes, (Strings{"a", "b"}));
  EXPECT_EQ(*blend.weights, (std::vector{0.3, 0.7}));
  EXPECT_THAT(
      error_of([] { parse_blend(Strings{"0.3", "a", "c", "b"}, "--data-path"); }),
      HasSubstr("--data-path mixes weights and paths: \"c\" stands where a weight was expected"));
  EXPECT_THAT(error_of([] { parse_blend(Strings{"0.3", "a", "0.7"}, "--data-path"); }),
              HasSubstr("--data-path ends with the weight \"0.7\", without a path after it"));
  EXPECT_THAT(error_of([] { parse_blend(Strings{"0", "a", "1", "b"}, "--data-path"); }),
              HasSubstr("weight 0 of a is not positive"));
}

class DatasetBuilderTest : public ::testing::Test {
 protected:
  DatasetBuilderTest() {
    for (int d = 0; d < 3; ++d)
      write_dataset(folder / ("d" + std::to_string(d)), std::vector<int32_t>(100, 20),
                    [d](int64_t i, int64_t) { return 1000 * d + i; });
    config.data_cache_path = folder / "cache";
    config.split = "80,15,5";
    request.sequence_length = 10;
    request.seed = 5;
    request.targets = {.train = 100, .valid = 20, .test = 5};
  }
  std::string prefix(int d) const { return folder / ("d" + std::to_string(d)); }
  TrainValidTestDatasets build() const { return build_train_valid_test_datasets(config, request); }

  TempFolder folder;
  DataConfig config;
  DatasetRequest request;
};

// The sequences that occur in a dataset.
std::set<int64_t> tokens_of(const Dataset& dataset) {
  std::set<int64_t> out;
  for (int64_t i = 0; i < dataset.size(); ++i)
    for (const int64_t token : dataset.sample(i).get<int64_t>("tokens")) out.insert(token);
  return out;
}

TEST_F(DatasetBuilderTest, SplitsOneFileWithoutOverlap) {
  config.data_path = {prefix(0)};
  const auto out = build();
  ASSERT_EQ(out.valid.size(), 1u);
  const auto train = tokens_of(*out.train), valid = tokens_of(*out.valid[0]),
             test = tokens_of(*out.test);
  EXPECT_EQ(*train.rbegin(), 79);
  EXPECT_EQ(*valid.begin(), 80);
  EXPECT_EQ(*valid.rbegin(), 94);
  EXPECT_EQ(*test.begin(), 95);
  EXPECT_GE(out.train->size(), 100);
  EXPECT_NE(out.train->fingerprint(), out.valid[0]->fingerprint());
}

TEST_F(DatasetBuilderTest, ASplitWithoutTargetOrWidthIsAbsent) {
  config.data_path = {prefix(0)};
  config.split = "90,10,0";
  request.targets.valid = 0;
  const auto out = build();
  EXPECT_NE(out.train, nullptr);
  EXPECT_TRUE(out.valid.empty());
  EXPECT_EQ(out.test, nullptr);
}

TEST_F(DatasetBuilderTest, BlendsByWeight) {
  config.data_path = {"1", prefix(0), "3", prefix(1)};
  config.split = "100,0,0";
  const auto out = build();
  EXPECT_EQ(out.train->size(), 100);
  Longs counts(2);
  for (int64_t i = 0; i < 100; ++i) {
    ++counts[out.train->locate(i).first];
    EXPECT_EQ(out.train->sample(i).get<int64_t>("tokens")[0] / 1000, out.train->locate(i).first);
  }
  EXPECT_EQ(counts, (Longs{25, 75}));
}

TEST_F(DatasetBuilderTest, BlendsBySizeWithoutWeights) {
  config.data_path = {prefix(0), prefix(1)};
  config.split = "50,50,0";
  request.targets = {.train = 1000000, .valid = std::nullopt, .test = 0};
  const auto out = build();
  EXPECT_EQ(out.train->size(), 2 * 99) << "each member once";
  EXPECT_EQ(out.valid[0]->size(), 2 * 99);
}

TEST_F(DatasetBuilderTest, AgreesWithMembersBuiltOneByOneForAnyNumberOfThreads) {
  config.data_path = {"1", prefix(0), "3", prefix(1), "2", prefix(2)};
  const auto one = build();
  config.num_dataset_builder_threads = 3;
  config.data_cache_path = folder / "other_cache";
  config.mmap_bin_files = false;
  const auto three = build();
  EXPECT_EQ(one.train->fingerprint(), three.train->fingerprint());
  for (int64_t i = 0; i < one.train->size(); ++i)
    ASSERT_EQ(one.train->sample(i).get<int64_t>("tokens"),
              three.train->sample(i).get<int64_t>("tokens"));
}

TEST_F(DatasetBuilderTest, ReadsArgumentFiles) {
  write_file_atomically(folder / "args", "2 " + prefix(0) + "\n 1 " + prefix(1) + "\n");
  config.data_args_path = folder / "args";
  const auto from_file = build();
  config.data_args_path.clear();
  config.data_path = {"2", prefix(0), "1", prefix(1)};
  EXPECT_EQ(from_file.train->fingerprint(), build().train->fingerprint());

  config.data_path.clear();
  config.per_split_data_args_path = folder / "splits.json";
  write_file_atomically(folder / "splits.json", "{\"train\": [\"1\", \"" + prefix(0) + "\", 2, \"" +
                                                    prefix(1) + "\"], \"valid\": \"" + prefix(2) +
                                                    "\", \"test\": null}");
  const auto out = build();
  EXPECT_EQ(*tokens_of(*out.valid[0]).begin(), 2000);
  EXPECT_EQ(out.test, nullptr);
  write_file_atomically(folder / "splits.json", "{\"train\": []}");
  EXPECT_THAT(error_of([&] { build(); }), HasSubstr("has no key \"valid\""));
  write_file_atomically(folder / "splits.json", "{\"train\": 3, \"valid\": [], \"test\": []}");
  EXPECT_THAT(error_of([&] { build(); }),
              HasSubstr("\"train\" is number, expected a list or a string"));
  write_file_atomically(folder / "splits.json", "{");
  EXPECT_THAT(error_of([&] { build(); }), HasSubstr("splits.json: is no JSON"));
}

TEST_F(DatasetBuilderTest, BuildsSeveralValidationSets) {
  config.split.clear();
  config.train_data_path = {prefix(0)};
  config.valid_data_path = {prefix(1), prefix(2)};
  config.multiple_validation_sets = true;
  request.targets.valid = std::nullopt;  // full validation
  auto out = build();
  ASSERT_EQ(out.valid.size(), 2u);
  EXPECT_EQ(out.valid_names, (Strings{"d1", "d2"}));
  EXPECT_EQ(out.valid[1]->size(), 199);
  EXPECT_EQ(*tokens_of(*out.valid[1]).begin(), 2000);
  config.validation_set_names = {"x", "y"};
  EXPECT_EQ(build().valid_names, (Strings{"x", "y"}));
  config.validation_set_names = {"x"};
  EXPECT_THAT(error_of([&] { build(); }),
              HasSubstr("--validation-set-names gives 1 names for 2 validation datasets"));
}

TEST_F(DatasetBuilderTest, MakesMockData) {
  config.mock_data = true;
  request.tokenizer = {.vocab_size = 40, .eod = 39};
  const auto out = build();
  EXPECT_EQ(out.train->size(), 100);
  EXPECT_EQ(out.valid[0]->size(), 20);
  EXPECT_LT(*tokens_of(*out.train).rbegin(), 40);
  request.tokenizer.vocab_size = 0;
  EXPECT_THAT(error_of([&] { build(); }),
              HasSubstr("--mock-data needs a vocabulary of at least 2 tokens"));
}

TEST_F(DatasetBuilderTest, RefusesWhatCannotWork) {
  EXPECT_THAT(error_of([&] { build(); }), HasSubstr("no data is given"));
  config.data_path = {prefix(9)};
  EXPECT_THAT(error_of([&] { build(); }), HasSubstr("no such file: " + prefix(9) + ".idx"));
  config.data_path = {prefix(0)};
  config.split = "99.9,0.1,0";
  EXPECT_THAT(error_of([&] { build(); }),
              HasSubstr("the valid split holds 0 tokens in 0 sequences, one sample needs 11"));
  config.split = "";
  config.data_path = {"1", prefix(0), "1", prefix(1)};
  request.targets = {.train = std::nullopt};
  EXPECT_THAT(error_of([&] { build(); }),
              HasSubstr("the weights of the train datasets have no effect"));
}

TEST_F(DatasetBuilderTest, RefusesABlendThatTakesMoreThanAMemberHolds) {
  config.data_path = {prefix(0)};
  config.split = "100,0,0";
  request.targets = {.train = std::nullopt};
  const auto member = build().train;
  EXPECT_THAT(error_of([&] { BlendedDataset({member}, {1.0}, 200, Split::kTrain); }),
              HasSubstr("the blend takes 200 samples from dataset 0, which holds 199"));
}

TEST_F(DatasetBuilderTest, DamagedBlendCacheIsRebuilt) {
  config.data_path = {"1", prefix(0), "3", prefix(1)};
  const auto order = [&] {
    const auto train = build().train;
    Longs out;
    for (int64_t i = 0; i < train->size(); ++i) out.push_back(train->locate(i).second);
    return out;
  };
  const Longs expected = order();
  int damaged = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache")) {
    if (entry.path().string().find("BlendedDataset-train-dataset") == std::string::npos) continue;
    std::string bytes = read_file(entry.path());
    bytes.back() ^= 0x40;
    write_file_atomically(entry.path(), bytes);
    EXPECT_EQ(order(), expected);
    ++damaged;
  }
  EXPECT_EQ(damaged, 2);
}

TEST(SplitTargets, FollowMegatron) {
  const SplitTargets targets = split_targets({.train_samples = 1000,
                                              .train_iters = 100,
                                              .eval_interval = 30,
                                              .eval_iters = 5,
                                              .eval_global_batch_size = 10});
  EXPECT_EQ(targets.train, 1000);
  EXPECT_EQ(targets.valid, (100 / 30 + 1) * 5 * 10);
  EXPECT_EQ(targets.test, 50);
  EXPECT_EQ(split_targets({.train_iters = 100,
                           .eval_interval = 30,
                           .eval_iters = 5,
                           .start_eval_at_iter = 60,
                           .eval_global_batch_size = 10})
                .valid,
            2 * 50);
  EXPECT_FALSE(split_targets({.full_validation = true}).valid.has_value());
}

TEST(DataConfig, ReportsEveryViolation) {
  DataConfig config;
  config.mock_data = true;
  config.data_path = {"a"};
  config.num_workers = -1;
  config.mid_level_dataset_surplus = -1;
  config.dataloader_inter_document_masking = config.reset_position_ids = true;
  config.validation_set_names = {"x"};
  Violations violations;
  config.validate(violations);
  EXPECT_EQ(violations.messages().size(), 5u);
  EXPECT_THAT(violations.messages()[0], HasSubstr("more than one source of data"));
}

}  // namespace
}  // namespace megatron::testing_datasets
