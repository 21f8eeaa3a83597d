// GPTDataset: items against the goldens, masks, caching, and errors.
#include "megatron/datasets/gpt/gpt_dataset.h"

#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "megatron/base/files.h"
#include "megatron/datasets/blended_dataset.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/datasets/reading_summary.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Longs = std::vector<int64_t>;

// True where row i may not attend to column j, [s, s].
std::vector<bool> attention_mask(std::span<const int32_t> document_starts,
                                 int64_t sequence_length) {
  std::vector<bool> masked(sequence_length * sequence_length, true);
  size_t piece = 0;
  for (int64_t row = 0; row < sequence_length; ++row) {
    while (piece + 1 < document_starts.size() && document_starts[piece + 1] <= row) ++piece;
    const int64_t first = document_starts.empty() ? 0 : document_starts[piece];
    for (int64_t column = first; column <= row; ++column)
      masked[row * sequence_length + column] = false;
  }
  return masked;
}

// The token of the goldens' items (make_goldens.py: item_cases).
int64_t golden_token(int64_t sequence, int64_t t) {
  int64_t token = (sequence * 7919 + t * 31) % 1000;
  if (token < 400) token %= 100;
  return token % 13 == 5 ? 31 : token;
}

std::shared_ptr<const IndexedDataset> open(const std::string& prefix, bool mmap = true) {
  return std::make_shared<const IndexedDataset>(prefix, IndexedDatasetOptions{.mmap = mmap});
}

GPTDatasetConfig config_of(int64_t sequence_length, int64_t seed = 1234) {
  GPTDatasetConfig config;
  config.sequence_length = sequence_length;
  config.seed = seed;
  config.use_cache = false;
  return config;
}

TEST(ReadingSummary, SaysTokensAndEpochs) {
  TempFolder folder;
  write_dataset(folder / "d", std::vector<int32_t>(10, 80), golden_token);  // 800 tokens
  const auto text = [&](int64_t wanted) {
    const GPTDataset dataset(open(folder / "d"), 0, 10, Split::kTrain, wanted, config_of(8));
    return reading_summary(dataset, wanted);
  };
  // An epoch has 99 samples and a rest
  EXPECT_EQ(text(50), "reads 400 tokens (50 samples of 8), 0.51 epochs");
  EXPECT_EQ(text(1000), "reads 8,000 tokens (1,000 samples of 8), 10.01 epochs");
  std::vector<std::shared_ptr<const Dataset>> members;
  for (const int64_t wanted : {40, 250})
    members.push_back(std::make_shared<GPTDataset>(open(folder / "d"), 0, 10, Split::kTrain, wanted,
                                                   config_of(8)));
  const BlendedDataset blend(members, {1, 5}, 240, Split::kTrain, config_of(8).cache_path);
  EXPECT_EQ(reading_summary(blend, 240),
            "reads 1,920 tokens (240 samples of 8), of each member at most 3 epochs");
}

TEST(GPTDataset, ItemsEqualGoldens) {
  const auto& spec = goldens()["items"];
  TempFolder folder;
  write_dataset(folder / "d", golden_lengths(spec["lengths"]), golden_token);
  for (const auto& item : spec["items"]) {
    GPTDatasetConfig config = config_of(spec["sequence_length"], spec["seed"]);
    config.tokenizer = {.vocab_size = 1000, .eod = spec["eod"], .pad = spec["pad"]};
    const int flags = item["flags"];
    config.eod_mask_loss = flags & 1;
    config.reset_position_ids = flags & 2;
    config.reset_attention_mask = flags & 4;
    const auto data = open(folder / "d", flags % 2 == 0);
    const GPTDataset dataset(data, 0, data->num_sequences(), Split::kTrain,
                             spec["num_samples"].get<int64_t>(), config);
    const Sample sample = dataset.sample(item["index"]);
    SCOPED_TRACE(item["flags"].dump() + " " + item["index"].dump());
    EXPECT_EQ(sample.get<int64_t>("tokens"), item["tokens"].get<Longs>());
    EXPECT_EQ(sample.get<int64_t>("labels"), item["labels"].get<Longs>());
    EXPECT_EQ(sample.get<int64_t>("position_ids"), item["position_ids"].get<Longs>());
    EXPECT_EQ(sample.get<float>("loss_mask"), item["loss_mask"].get<std::vector<float>>());
    const std::vector<bool> mask =
        attention_mask(sample.document_starts, dataset.sequence_length());
    EXPECT_EQ(digest(Longs(mask.begin(), mask.end())), item["mask_digest"].get<std::string>());
    const std::vector<int64_t> ids =
        document_ids(sample.document_starts, dataset.sequence_length());
    for (size_t row = 0; row < ids.size(); ++row)
      for (size_t column = 0; column < ids.size(); ++column)
        EXPECT_EQ(mask[row * ids.size() + column], column > row || ids[row] != ids[column]);
  }
}

// Documents of 3, 4 and 6 tokens: 10 11 12 | 20 21 22 23 | 30 ... 35.
std::shared_ptr<const IndexedDataset> small(const TempFolder& folder) {
  write_dataset(folder / "s", {3, 4, 6}, [](int64_t i, int64_t t) { return 10 * (i + 1) + t; });
  return open(folder / "s");
}

TEST(GPTDataset, InterDocumentMaskingFollowsTheFilesDocuments) {
  TempFolder folder;
  GPTDatasetConfig config = config_of(12);
  config.inter_document_masking = true;
  const GPTDataset dataset(small(folder), 0, 3, Split::kTrain, std::nullopt, config);
  ASSERT_EQ(dataset.size(), 1);
  const Sample sample = dataset.sample(0);
  ASSERT_EQ(sample.document_starts.size(), 3u);
  for (size_t i = 0; i < sample.get<int64_t>("tokens").size(); ++i)
    EXPECT_EQ(sample.get<int64_t>("position_ids")[i], sample.get<int64_t>("tokens")[i] % 10);
  for (const int32_t start : sample.document_starts)
    EXPECT_EQ(sample.get<int64_t>("tokens")[start] % 10, 0);
  EXPECT_EQ(cu_seqlens(sample.document_starts, 12).back(), 12);
}

TEST(GPTDataset, WithoutExtraTokenLabelsAreRolled) {
  TempFolder folder;
  GPTDatasetConfig config = config_of(4);
  config.add_extra_token = false;
  const GPTDataset dataset(small(folder), 0, 3, Split::kTrain, std::nullopt, config);
  EXPECT_EQ(dataset.size(), 3);
  const Sample sample = dataset.sample(1);
  const Longs tokens = sample.get<int64_t>("tokens"), labels = sample.get<int64_t>("labels");
  EXPECT_EQ(Longs(tokens.begin() + 1, tokens.end()), Longs(labels.begin(), labels.end() - 1));
  EXPECT_EQ(sample.get<float>("loss_mask"), (std::vector<float>{1, 1, 1, 0}));
  EXPECT_EQ(sample.get<int64_t>("labels").back(), 0);
}

TEST(GPTDataset, KeepsAPartialValidationSequenceWhenAsked) {
  TempFolder folder;
  GPTDatasetConfig config = config_of(5);
  config.drop_last_partial_validation_sequence = false;
  const auto data = small(folder);
  EXPECT_EQ(GPTDataset(data, 0, 3, Split::kTrain, std::nullopt, config).size(), 2);
  const GPTDataset dataset(data, 0, 3, Split::kValid, std::nullopt, config);
  ASSERT_EQ(dataset.size(), 3);  // 12 predictions in rows of 5
  float counted = 0;
  for (int64_t i = 0; i < 3; ++i)
    for (const float weight : dataset.sample(i).get<float>("loss_mask")) counted += weight;
  EXPECT_EQ(counted, 12);
}

TEST(GPTDataset, PadTokenIsIgnoredWhenAmbiguous) {
  TempFolder folder;
  GPTDatasetConfig config = config_of(12);
  config.tokenizer = {.vocab_size = 100, .eod = 22, .pad = 22};
  const auto data = small(folder);
  const auto count = [&] {
    float sum = 0;
    for (const float weight : GPTDataset(data, 0, 3, Split::kTrain, std::nullopt, config)
                                  .sample(0)
                                  .get<float>("loss_mask"))
      sum += weight;
    return sum;
  };
  EXPECT_EQ(count(), 12);
  config.allow_ambiguous_pad_tokens = true;
  EXPECT_EQ(count(), 11);
}

TEST(GPTDataset, NamesTokensOutsideTheVocabulary) {
  TempFolder folder;
  GPTDatasetConfig config = config_of(12);
  config.tokenizer.vocab_size = 35;
  const GPTDataset dataset(small(folder), 0, 3, Split::kTrain, std::nullopt, config);
  EXPECT_THAT(
      error_of([&] { dataset.sample(0); }),
      HasSubstr(
          "s.bin: document 2, sequence 2, offset 5: token id 35 is outside the vocabulary of 35"));
  EXPECT_THAT(error_of([&] { dataset.sample(1); }), HasSubstr("there is no sample 1 of 1"));
}

TEST(GPTDataset, NamesTheSplitThatHoldsTooFewTokens) {
  TempFolder folder;
  const auto data = small(folder);
  EXPECT_THAT(error_of([&] { GPTDataset(data, 0, 2, Split::kValid, 5, config_of(8)); }),
              HasSubstr("/s: the valid split holds 7 tokens in 2 sequences, one sample needs 9"));
  EXPECT_THAT(error_of([&] { GPTDataset(data, 1, 1, Split::kTest, 5, config_of(8)); }),
              HasSubstr("the test split holds 0 tokens in 0 sequences"));
  GPTDatasetConfig config = config_of(4);
  config.eod_mask_loss = true;
  EXPECT_THAT(error_of([&] { GPTDataset(data, 0, 3, Split::kTrain, 5, config); }),
              HasSubstr("the tokenizer has no end-of-document token"));
  EXPECT_THAT(error_of([&] { GPTDataset(data, 0, 3, Split::kTrain, 5, config_of(4, -1)); }),
              HasSubstr("--seed is -1"));
}

TEST(GPTDataset, FingerprintChangesWithWhatTheOrderDependsOn) {
  TempFolder folder;
  const auto data = small(folder);
  const auto print = [&](int64_t length, int64_t seed, std::optional<int64_t> samples,
                         int64_t last) {
    return GPTDataset(data, 0, last, Split::kTrain, samples, config_of(length, seed)).fingerprint();
  };
  const std::string base = print(4, 1, 10, 3);
  EXPECT_EQ(base.size(), 32u);
  EXPECT_EQ(base, print(4, 1, 10, 3));
  for (const std::string& other : {print(5, 1, 10, 3), print(4, 2, 10, 3), print(4, 1, 11, 3),
                                   print(4, 1, 10, 2), print(4, 1, {}, 3)})
    EXPECT_NE(base, other);
}

std::vector<Longs> all_tokens(const Dataset& dataset) {
  std::vector<Longs> out;
  for (int64_t i = 0; i < dataset.size(); ++i)
    out.push_back(dataset.sample(i).get<int64_t>("tokens"));
  return out;
}

TEST(GPTDatasetCache, IsReadBackAndRebuiltWhenDamaged) {
  TempFolder folder;
  const auto data = small(folder);
  GPTDatasetConfig config = config_of(4);
  const auto expected = all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config));
  config.use_cache = true;
  EXPECT_EQ(all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config)), expected);
  EXPECT_TRUE(std::filesystem::exists(folder / "s/cache/GPTDataset_indices"));
  config.cache_path = folder / "cache";
  EXPECT_EQ(all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config)), expected);
  int damaged = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache")) {
    if (entry.path().extension() == ".lock" || entry.path().filename().string().ends_with("-lock"))
      continue;
    std::string bytes = read_file(entry.path());
    bytes[bytes.size() - 3] ^= 1;
    write_file_atomically(entry.path(), bytes);
    EXPECT_EQ(all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config)), expected)
        << entry.path();
    std::filesystem::resize_file(entry.path(), 5);
    EXPECT_EQ(all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config)), expected)
        << entry.path();
    ++damaged;
  }
  EXPECT_EQ(damaged, 5);
}

TEST(GPTDatasetCache, IsBuiltOnceByManyThreads) {
  TempFolder folder;
  const auto data = small(folder);
  GPTDatasetConfig config = config_of(4);
  config.use_cache = true;
  config.cache_path = folder / "cache";
  const auto expected = all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config_of(4)));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      EXPECT_EQ(all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config)), expected);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config)), expected);
}

TEST(GPTDatasetCache, FallsBackToMemoryWhereNothingCanBeWritten) {
  TempFolder folder;
  const auto data = small(folder);
  GPTDatasetConfig config = config_of(4);
  const auto expected = all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config));
  config.use_cache = true;
  write_file_atomically(folder / "file", "x");
  config.cache_path = folder / "file/cache";
  EXPECT_EQ(all_tokens(GPTDataset(data, 0, 3, Split::kTrain, 20, config)), expected);
}

}  // namespace
}  // namespace megatron::testing_datasets
