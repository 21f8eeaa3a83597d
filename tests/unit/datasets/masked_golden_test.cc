// Every sample of BERT and T5 against Megatron-LM's datasets, through the loader, resumed and
// blended.
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/datasets/data_loader.h"
#include "megatron/datasets/detail/numpy_random.h"
#include "megatron/datasets/masked/masked_datasets.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using Longs = std::vector<int64_t>;

const std::string kFolder = MEGATRON_SOURCE_DIR "/tests/golden/masked/";

nlohmann::json read_golden(const std::string& name) {
  return nlohmann::json::parse(std::ifstream(kFolder + name + ".json"));
}

TEST(NumpyRandom, DrawsEqualNumpyOnGoldens) {
  for (const auto& spec : read_golden("numpy")) {
    NumpyRandom random(spec["seed"].get<uint32_t>());
    for (const auto& draw : spec["randint_1_n"])
      EXPECT_EQ(random.randint(1, draw[0].get<int64_t>()), draw[1].get<int64_t>());
    for (const auto& draw : spec["random"]) EXPECT_EQ(random.uniform(), draw.get<double>());
    for (const auto& draw : spec["geometric_0.2"])
      EXPECT_EQ(random.geometric(0.2), draw.get<int64_t>());
    const double sum = 1.0 + 1.0 / 2 + 1.0 / 3;
    const double weights[] = {1.0 / sum, 1.0 / 2 / sum, 1.0 / 3 / sum};
    const std::vector<double> sums = NumpyRandom::cumulative(weights);
    for (const auto& draw : spec["choice_123"])
      EXPECT_EQ(random.choice(sums) + 1, draw.get<size_t>());
    Longs values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    random.shuffle(std::span(values));
    EXPECT_EQ(values, spec["shuffle_11"].get<Longs>());
    for (const auto& draw : spec["randint_0_n"])
      EXPECT_EQ(random.randint(0, draw[0].get<int64_t>()), draw[1].get<int64_t>());
    EXPECT_EQ(random.uniform(), spec["random_after"].get<double>());
  }
}

// The elements of a column of one sample, whatever their type.
Longs elements(const SampleSpans& sample, const std::string& name) {
  const auto converted = [](const auto& span) { return Longs(span.begin(), span.end()); };
  switch (sample.columns()[sample.columns().index(name)].type) {
    case ElementType::kFloat32:
      return converted(sample.get<float>(name));
    case ElementType::kUInt8:
      return converted(sample.get<uint8_t>(name));
    default:
      return converted(sample.get<int64_t>(name));
  }
}

class MaskedGolden : public ::testing::TestWithParam<MaskedKind> {
 protected:
  MaskedGolden() {
    const bool t5 = GetParam() == MaskedKind::kT5;
    cases_ = read_golden(t5 ? "t5" : "bert");
    names_ = t5 ? std::vector<std::string>{"text_enc",  "text_dec", "labels",  "loss_mask",
                                           "truncated", "enc_mask", "dec_mask"}
                : std::vector<std::string>{"text",         "types",     "labels",   "is_random",
                                           "padding_mask", "loss_mask", "truncated"};
  }

  TrainValidTestDatasets build(const nlohmann::json& spec, const std::string& cache) const {
    DataConfig data;
    for (const std::string word : spec["data"])
      data.data_path.push_back(std::isalpha(word[0]) != 0 ? kFolder + word : word);
    data.split = spec["split"];
    data.data_cache_path = cache;
    MaskedDataConfig masked;
    masked.mask_prob = spec["mask_prob"];
    masked.short_seq_prob = spec["short_seq_prob"];
    masked.masking_max_ngram = spec["max_ngram"].get<int64_t>();
    masked.masking_whole_word = spec["full_word"];
    masked.masking_longer_ngrams = spec["longer"];
    masked.masking_geometric =
        spec["geometric"].get<bool>() ? MaskingGeometric::kTrue : MaskingGeometric::kFalse;
    const MaskedModel model{GetParam(), spec.value("binary_head", true),
                            spec.value("decoder_seq_length", int64_t{0})};
    TokenizerConfig config;
    config.tokenizer_type =
        spec["sentinels"].get<int>() > 0 ? "BertWordPieceCase" : "BertWordPieceLowerCase";
    config.vocab_file = kFolder + "vocab.txt";
    const auto tokenizer = make_tokenizer(config);
    DatasetRequest request;
    request.sequence_length = spec["seq_length"];
    request.seed = spec["seed"];
    request.targets = {spec["samples"][0].get<int64_t>(), spec["samples"][1].get<int64_t>(),
                       spec["samples"][2].get<int64_t>()};
    request.text_tokenizer = tokenizer.get();
    return build_masked_datasets(model, data, masked, request);
  }

  // Appends the values of a sample in the order of the goldens.
  void append(const SampleSpans& sample, Longs& out) const {
    for (const std::string& name : names_) {
      const Longs values = elements(sample, name);
      out.insert(out.end(), values.begin(), values.end());
    }
  }

  // All samples through a loader that starts at `consumed`.
  Longs read_all(const std::shared_ptr<const Dataset>& dataset, int64_t workers, int64_t count,
                 int64_t consumed = 0) const {
    DataLoaderOptions options;
    options.num_workers = workers;
    options.consumed_samples = consumed;
    DataLoader loader(dataset, options);
    Longs values;
    for (int64_t i = consumed; i < count; ++i)
      append(SampleSpans(loader.next()->data(), 0), values);
    return values;
  }

  nlohmann::json cases_;
  std::vector<std::string> names_;
};

TEST_P(MaskedGolden, SamplesAreMegatrons) {
  TempFolder cache;
  for (const auto& spec : cases_) {
    SCOPED_TRACE(spec["data"].dump() + " " + spec["seed"].dump());
    const TrainValidTestDatasets all = build(spec, cache.path());
    const std::shared_ptr<const Dataset> datasets[] = {
        all.train, all.valid.empty() ? nullptr : all.valid[0], all.test};
    for (int split = 0; split < kNumSplits; ++split) {
      const std::string name = to_string(static_cast<Split>(split));
      ASSERT_EQ(datasets[split] != nullptr, spec["splits"].contains(name)) << name;
      if (!datasets[split]) continue;
      const auto& expected = spec["splits"][name];
      EXPECT_EQ(datasets[split]->size(), expected["length"].get<int64_t>()) << name;
      const int64_t count = expected["samples"];
      for (const auto& [index, columns] : expected["ends"].items()) {
        Sample sample = datasets[split]->sample(std::stoll(index));
        for (const std::string& column : names_)
          EXPECT_EQ(elements(sample.spans(), column), columns[column].get<Longs>())
              << name << " " << index << " " << column;
      }
      for (const int64_t workers : {0, 1, 8})
        EXPECT_EQ(digest(read_all(datasets[split], workers, count)),
                  expected["digest"].get<std::string>())
            << name << ", workers " << workers;
    }
  }
}

TEST_P(MaskedGolden, ResumesWhereItStopped) {
  TempFolder cache;
  for (const auto& spec : cases_) {
    const int64_t count = spec["splits"]["train"]["samples"], half = count / 2;
    Longs values = read_all(build(spec, cache.path()).train, 2, half);
    // Another process: the order comes from the cache.
    const std::vector<std::string> files = cache.files();
    const Longs rest = read_all(build(spec, cache.path()).train, 8, count, half);
    EXPECT_EQ(cache.files(), files);
    values.insert(values.end(), rest.begin(), rest.end());
    EXPECT_EQ(digest(values), spec["splits"]["train"]["digest"].get<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, MaskedGolden, ::testing::Values(MaskedKind::kBert, MaskedKind::kT5),
                         [](const auto& info) {
                           return std::string(info.param == MaskedKind::kBert ? "Bert" : "T5");
                         });

}  // namespace
}  // namespace megatron::testing_datasets
