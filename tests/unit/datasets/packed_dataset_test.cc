// Masked samples of packed text against a twin in NumPy, through the loader, resumed and blended;
// made-up ones; what is refused.
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/datasets/data_loader.h"
#include "megatron/datasets/masked/masked_datasets.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Longs = std::vector<int64_t>;

const std::string kMaskedFolder = MEGATRON_SOURCE_DIR "/tests/golden/masked/";
constexpr const char* kPackedColumns[] = {"text", "labels", "loss_mask", "position_ids"};

Longs packed_column(const SampleSpans& sample, const std::string& name) {
  const auto converted = [](const auto& span) { return Longs(span.begin(), span.end()); };
  return name == "loss_mask" ? converted(sample.get<float>(name))
                             : converted(sample.get<int64_t>(name));
}

struct PackedRun {
  PackedRun() {
    masked.bert_data = BertData::kPacked;
    TokenizerConfig config;
    config.tokenizer_type = "BertWordPieceLowerCase";
    config.vocab_file = kMaskedFolder + "vocab.txt";
    tokenizer = make_tokenizer(config);
    data.data_path = {kMaskedFolder + "a"};
    data.split = "1,0,0";
    data.data_cache_path = cache.path();
    request.sequence_length = 64;
    request.targets = {20, 0, 0};
  }
  explicit PackedRun(const nlohmann::json& spec) : PackedRun() {
    data.data_path = {kMaskedFolder + spec["data"].get<std::string>()};
    const auto& parts = spec["split"];
    data.split = parts[0].dump() + "," + parts[1].dump() + "," + parts[2].dump();
    masked.mask_prob = spec["mask_prob"];
    masked.masking_max_ngram = spec["max_ngram"].get<int64_t>();
    masked.masking_whole_word = spec["full_word"];
    masked.masking_longer_ngrams = spec["longer"];
    masked.masking_geometric =
        spec["geometric"].get<bool>() ? MaskingGeometric::kTrue : MaskingGeometric::kFalse;
    masked.mlm_replace = spec["replace"].get<std::vector<double>>();
    request.sequence_length = spec["seq_length"];
    request.seed = spec["seed"];
    const auto target = [&](int split) {
      const auto& count = spec["samples"][static_cast<size_t>(split)];
      return count.is_null() ? std::optional<int64_t>() : count.get<int64_t>();
    };
    request.targets = {target(0), target(1), target(2)};
  }
  TrainValidTestDatasets build(bool binary_head = false) {
    request.text_tokenizer = tokenizer.get();
    return build_masked_datasets({MaskedKind::kBert, binary_head}, data, masked, request);
  }

  TempFolder cache;
  MaskedDataConfig masked;
  DataConfig data;
  DatasetRequest request;
  std::unique_ptr<Tokenizer> tokenizer;
};

// All values of the samples [consumed, count) in the order of the goldens.
Longs read_packed(const std::shared_ptr<const Dataset>& dataset, int64_t workers, int64_t count,
                  int64_t consumed = 0) {
  DataLoaderOptions options;
  options.num_workers = workers;
  options.consumed_samples = consumed;
  DataLoader loader(dataset, options);
  Longs values;
  for (int64_t i = consumed; i < count; ++i) {
    const auto batch = loader.next();
    for (const char* name : kPackedColumns) {
      const Longs column = packed_column(SampleSpans(batch->data(), 0), name);
      values.insert(values.end(), column.begin(), column.end());
    }
    const std::vector<int32_t>& starts = batch->document_starts[0];
    values.insert(values.end(), starts.begin(), starts.end());
  }
  return values;
}

TEST(PackedDataset, SamplesAreThoseOfTheTwin) {
  for (const auto& spec : nlohmann::json::parse(std::ifstream(kMaskedFolder + "packed.json"))) {
    SCOPED_TRACE(spec["data"].dump() + " " + spec["seed"].dump());
    PackedRun run(spec);
    const TrainValidTestDatasets all = run.build();
    const std::shared_ptr<const Dataset> datasets[] = {
        all.train, all.valid.empty() ? nullptr : all.valid[0], all.test};
    for (int split = 0; split < kNumSplits; ++split) {
      const std::string name = to_string(static_cast<Split>(split));
      ASSERT_EQ(datasets[split] != nullptr, spec["splits"].contains(name)) << name;
      if (!datasets[split]) continue;
      const auto& expected = spec["splits"][name];
      EXPECT_EQ(datasets[split]->size(), expected["length"].get<int64_t>()) << name;
      for (const auto& [index, columns] : expected["ends"].items()) {
        Sample sample = datasets[split]->sample(std::stoll(index));
        for (const char* column : kPackedColumns)
          EXPECT_EQ(packed_column(sample.spans(), column), columns[column].get<Longs>())
              << name << " " << index << " " << column;
        EXPECT_EQ(sample.document_starts, columns["starts"].get<std::vector<int32_t>>());
      }
      const int64_t count = expected["samples"];
      for (const int64_t workers : {0, 1, 8})
        EXPECT_EQ(digest(read_packed(datasets[split], workers, count)),
                  expected["digest"].get<std::string>())
            << name << ", workers " << workers;
    }
    // Another process: the order comes from the cache.
    const std::vector<std::string> files = run.cache.files();
    const auto& train = spec["splits"]["train"];
    const int64_t count = train["samples"], half = count / 2;
    Longs values = read_packed(all.train, 2, half);
    const Longs rest = read_packed(run.build().train, 8, count, half);
    EXPECT_EQ(run.cache.files(), files);
    values.insert(values.end(), rest.begin(), rest.end());
    EXPECT_EQ(digest(values), train["digest"].get<std::string>());
  }
}

TEST(PackedDataset, BlendsHaveTheSamplesOfTheirMembers) {
  PackedRun blended;
  blended.data.data_path = {"0.5", kMaskedFolder + "a", "0.5", kMaskedFolder + "c"};
  blended.request.targets = {60, 0, 0};
  const auto dataset = blended.build().train;
  std::array<std::shared_ptr<const Dataset>, 2> members;
  for (const size_t member : {0, 1}) {
    PackedRun one;
    one.data.data_path = {blended.data.data_path[2 * member + 1]};
    one.request.targets = {31, 0, 0};  // as the blend asks: half, and half a percent more
    members[member] = one.build().train;
  }
  for (int64_t i = 0; i < 60; ++i) {
    const auto [member, index] = dataset->locate(i);
    Sample sample = dataset->sample(i),
           expected = members[static_cast<size_t>(member)]->sample(index);
    for (const char* column : kPackedColumns)
      ASSERT_EQ(packed_column(sample.spans(), column), packed_column(expected.spans(), column))
          << i << " " << column;
    EXPECT_EQ(sample.document_starts, expected.document_starts);
  }
}

TEST(PackedDataset, MadeUpSamplesAreFullOfDocuments) {
  PackedRun run;
  run.data.mock_data = true;
  run.data.data_path = {};
  const auto dataset = run.build().train;
  size_t documents = 0;
  Longs first;
  for (int64_t i = 0; i < 20; ++i) {
    Sample sample = dataset->sample(i);
    const Longs text = packed_column(sample.spans(), "text"),
                labels = packed_column(sample.spans(), "labels"),
                positions = packed_column(sample.spans(), "position_ids");
    EXPECT_NE(text, first);
    first = text;
    EXPECT_GT(std::count_if(labels.begin(), labels.end(), [](int64_t id) { return id >= 0; }), 0);
    documents += sample.document_starts.size();
    for (const int32_t start : sample.document_starts) {
      const auto at = static_cast<size_t>(start);
      EXPECT_EQ(text[at], *run.tokenizer->cls());
      EXPECT_EQ(positions[at], 0);
      EXPECT_TRUE(at == 0 || text[at - 1] == *run.tokenizer->sep());
    }
  }
  EXPECT_GT(documents, 25U) << "of 20 samples";
}

TEST(PackedDataset, WhatCannotBePackedIsRefused) {
  EXPECT_THAT(error_of([] { PackedRun().build(/*binary_head=*/true); }),
              HasSubstr("--bert-data packed: packed samples have no two halves, whose order the "
                        "binary head predicts\nhint: --bert-no-binary-head"));
  PackedRun shorter;
  shorter.request.sequence_length = 2;
  EXPECT_THAT(error_of([&] { shorter.build(); }),
              HasSubstr("sequence length is 2, the tokens around a document are 2"));
  PackedRun longer;
  longer.request.sequence_length = 100000;
  EXPECT_THAT(error_of([&] { longer.build(); }),
              HasSubstr("documents, with those around each of them, one packed sample needs 100000"
                        "\nhint: give more data"));
  PackedRun seed;
  seed.request.seed = -1;
  EXPECT_THAT(error_of([&] { seed.build(); }), HasSubstr("--seed is -1"));
  PackedRun without;
  TokenizerConfig config;
  config.tokenizer_type = "NullTokenizer";
  config.vocab_size = 300;
  without.tokenizer = make_tokenizer(config);
  EXPECT_THAT(error_of([&] { without.build(); }), HasSubstr("has no [CLS], [SEP], [MASK]"));
  MaskedDataConfig masked;
  masked.bert_data = BertData::kPacked;
  masked.short_seq_prob = 0.2;
  Violations violations;
  masked.validate(violations);
  EXPECT_THAT(violations.messages(),
              ::testing::ElementsAre(HasSubstr("--short-seq-prob has no effect")));
}

}  // namespace
}  // namespace megatron::testing_datasets
