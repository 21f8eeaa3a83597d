// The rules of masked samples that goldens do not show one by one, and their errors.
#include <algorithm>
#include <numeric>

#include "megatron/base/files.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/datasets/masked/bert_dataset.h"
#include "megatron/datasets/masked/masked_datasets.h"
#include "megatron/datasets/masked/t5_dataset.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Longs = std::vector<int64_t>;

// Ids 0 to 4 are [PAD] [UNK] [CLS] [SEP] [MASK], 90 to 99 sentinels; odd ids from 51 on continue
// the word before them.
MaskedTokens small_tokens() {
  MaskedTokens tokens;
  tokens.pad = 0;
  tokens.cls = tokens.decoder_start = 2;
  tokens.sep = tokens.eos = 3;
  tokens.mask = 4;
  tokens.vocab_size = 100;
  tokens.sentinels.resize(10);
  std::iota(tokens.sentinels.begin(), tokens.sentinels.end(), 90);
  tokens.replacements.resize(100);
  std::iota(tokens.replacements.begin(), tokens.replacements.end(), 0);
  tokens.continues_word.resize(100);
  tokens.ends_word.resize(100);
  for (size_t id = 51; id < 90; id += 2) tokens.continues_word[id] = 1;
  tokens.identity.name = "a vocabulary of 100";
  return tokens;
}

// One run of sentences for every index.
class OneRun final : public SentenceSource {
 public:
  OneRun(std::vector<Longs> sentences, int64_t target) {
    for (const Longs& sentence : sentences) {
      run_.tokens.insert(run_.tokens.end(), sentence.begin(), sentence.end());
      run_.ends.push_back(run_.tokens.size());
    }
    run_.target = target;
  }
  int64_t size() const override { return 1000; }
  void read(int64_t, SentenceRun& out) const override { out = run_; }
  std::string name() const override { return "one run"; }
  void describe(JsonWriter&) const override {}

 private:
  SentenceRun run_;
};

BertDataset bert(const MaskedTokens& tokens, std::vector<Longs> sentences, int64_t target,
                 BertDatasetConfig config) {
  config.sequence_length = 24;
  config.sentences.seed = 7;
  return {std::make_unique<OneRun>(std::move(sentences), target),
          std::make_shared<MaskedTokens>(tokens), config};
}

T5Dataset t5(const MaskedTokens& tokens, std::vector<Longs> sentences, int64_t target,
             const MaskingOptions& masking, int64_t decoder_length = 20) {
  T5DatasetConfig config{.sequence_length = 24,
                         .decoder_sequence_length = decoder_length,
                         .masking = masking,
                         .sentences = {.seed = 7}};
  return {std::make_unique<OneRun>(std::move(sentences), target),
          std::make_shared<MaskedTokens>(tokens), config};
}

Longs get(const Sample& sample, const char* column) { return sample.get<int64_t>(column); }

// Positions that are masked in one of many samples.
std::vector<bool> ever_masked(const BertDataset& dataset) {
  std::vector<bool> masked(24);
  for (int64_t i = 0; i < 200; ++i) {
    const Longs labels = get(dataset.sample(i), "labels");
    for (size_t at = 0; at < labels.size(); ++at) masked[at] = masked[at] || labels[at] >= 0;
  }
  return masked;
}

TEST(Masking, NeverMasksSpecialTokensAndKeepsWordsWhole) {
  BertDatasetConfig config;
  config.binary_head = false;
  config.masking.max_ngram = 1;
  // [CLS] 10 3 51 12 53 2 14 [SEP]: the [SEP] and [CLS] of the text are not masked, and 51
  // continues the word 10 although a [SEP] lies between them.
  const std::vector<Longs> text = {{10, 3, 51, 12, 53, 2, 14}};
  const BertDataset whole = bert(small_tokens(), text, 21, config);
  std::vector<bool> expected(24);
  for (const size_t at : {1, 3, 4, 5, 7}) expected[at] = true;
  for (const size_t at : {1, 3, 4, 5}) expected[at] = false;  // two tokens are over the budget of 1
  EXPECT_EQ(ever_masked(whole), expected);
  config.masking.probability = 0.25;  // a budget of 2
  const BertDataset pairs = bert(small_tokens(), text, 21, config);
  for (const size_t at : {1, 3, 4, 5}) expected[at] = true;
  EXPECT_EQ(ever_masked(pairs), expected);
  for (int64_t i = 0; i < 200; ++i) {
    const Longs labels = get(pairs.sample(i), "labels");
    EXPECT_EQ(labels[1] >= 0, labels[3] >= 0);
    EXPECT_EQ(labels[4] >= 0, labels[5] >= 0);
  }
  config.masking.whole_word = false;
  bool alone = false;
  const BertDataset single = bert(small_tokens(), text, 21, config);
  for (int64_t i = 0; i < 200; ++i) {
    const Longs labels = get(single.sample(i), "labels");
    alone = alone || (labels[4] >= 0) != (labels[5] >= 0);
  }
  EXPECT_TRUE(alone);
}

TEST(Masking, BudgetIsAShareOfTargetAndTokens) {
  BertDatasetConfig config;
  config.binary_head = false;
  config.masking.max_ngram = 1;
  const auto masked = [&](int64_t target) {
    const BertDataset dataset =
        bert(small_tokens(), {{10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21}}, target, config);
    const Longs labels = get(dataset.sample(3), "labels");
    return std::count_if(labels.begin(), labels.end(), [](int64_t id) { return id >= 0; });
  };
  EXPECT_EQ(masked(21), 2) << "round(14 x 0.15)";
  EXPECT_EQ(masked(12), 1) << "0.15 x 12 = 1.8 has no room for a second token";
  EXPECT_EQ(masked(6), 0) << "0.15 x 6 = 0.9 has no room for a token";
}

TEST(Masking, WordsFollowTheMarkOfTheirBeginning) {
  MaskedTokens tokens = small_tokens();
  // As with a mark of a beginning: all but 10 and 12 continue, and special tokens end a word.
  std::fill(tokens.continues_word.begin(), tokens.continues_word.end(), 1);
  tokens.continues_word[10] = tokens.continues_word[12] = 0;
  for (size_t id = 0; id < 5; ++id) tokens.continues_word[id] = 0, tokens.ends_word[id] = 1;
  const MaskingOptions options{.probability = 0.3, .max_ngram = 1};
  const Masking masking(options, tokens);
  for (uint32_t seed = 0; seed < 100; ++seed) {
    NumpyRandom random(seed);
    MaskedPositions masked;
    masking.draw_positions(Longs{20, 21, 10, 22, 12, 3, 23, 24}, 8, random, masked);
    size_t begin = 0;
    for (const size_t end : masked.ends) {
      const Longs span(masked.positions.begin() + static_cast<std::ptrdiff_t>(begin),
                       masked.positions.begin() + static_cast<std::ptrdiff_t>(end));
      EXPECT_THAT(span, ::testing::AnyOf(Longs{0, 1}, Longs{2, 3}, Longs{4}, Longs{6, 7}));
      begin = end;
    }
  }
}

TEST(Masking, ReplacesBySharesWithIdsOfTheVocabulary) {
  MaskedTokens tokens = small_tokens();
  tokens.replacements = {7, 40, 99};  // a vocabulary with gaps
  BertDatasetConfig config;
  config.binary_head = false;
  config.masking.probability = 0.5;
  const auto count = [&](double masks, double random, double kept) {
    config.masking.masks = masks;
    config.masking.random = random;
    config.masking.kept = kept;
    const BertDataset dataset =
        bert(tokens, {{10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}}, 21, config);
    std::array<double, 3> counts{};
    double all = 0;
    for (int64_t i = 0; i < 300; ++i) {
      const Sample sample = dataset.sample(i);
      const Longs text = get(sample, "text"), labels = get(sample, "labels");
      for (size_t at = 0; at < text.size(); ++at) {
        if (labels[at] < 0) continue;
        const size_t which = text[at] == 4 ? 0 : text[at] == labels[at] ? 2 : 1;
        if (which == 1) {
          EXPECT_THAT(text[at], ::testing::AnyOf(7, 40, 99));
        }
        ++counts[which];
        ++all;
      }
    }
    for (double& c : counts) c /= all;
    return counts;
  };
  const auto usual = count(0.8, 0.1, 0.1), other = count(0.2, 0.6, 0.2);
  const std::array<double, 3> shares[] = {{0.8, 0.1, 0.1}, {0.2, 0.6, 0.2}};
  for (size_t k = 0; k < 3; ++k) {
    EXPECT_NEAR(usual[k], shares[0][k], 0.04);
    EXPECT_NEAR(other[k], shares[1][k], 0.04);
  }
}

TEST(BertDataset, PaddingIsThatOfTheTokenizer) {
  BertDatasetConfig config;
  config.binary_head = false;
  config.masking.masks = 1;  // so that no draw puts the padding token into the text
  config.masking.random = config.masking.kept = 0;
  const std::vector<Longs> text = {{10, 60, 11, 0, 12}};
  MaskedTokens tokens = small_tokens();
  const auto read = [&] { return bert(tokens, text, 21, config).sample(5); };
  const auto padding = [](const Sample& sample) {
    const auto mask = sample.get<uint8_t>("padding_mask");
    return Longs(mask.begin(), mask.begin() + 8);
  };
  const Sample sample = read();
  const bool hole_is_masked = get(sample, "text")[4] == 4;
  EXPECT_EQ(padding(sample), (Longs{1, 1, 1, 1, hole_is_masked ? 1 : 0, 1, 1, 0})) << "a hole";
  EXPECT_EQ(get(sample, "text").back(), 0);
  tokens.pad = 60;
  const Sample other = read();
  const bool masked = get(other, "text")[2] == 4;
  EXPECT_EQ(padding(other), (Longs{1, 1, masked ? 1 : 0, 1, 1, 1, 1, 0}));
  EXPECT_EQ(get(other, "text").back(), 60);
  EXPECT_EQ(get(other, "types").back(), 0) << "not the padding token, which is no type";
  tokens.pad = -1;
  const Sample without = read();
  EXPECT_EQ(padding(without), (Longs{1, 1, 1, 1, 1, 1, 1, 0}));
  EXPECT_EQ(get(without, "text").back(), 0);
}

TEST(BertDataset, BothHalvesAreInOrderOrSwapped) {
  const BertDataset dataset = bert(small_tokens(), {{10, 12}, {20}, {30, 32}}, 21, {});
  std::array<int, 2> seen{};
  for (int64_t i = 0; i < 100; ++i) {
    const Sample sample = dataset.sample(i);
    const Longs types = get(sample, "types"), labels = get(sample, "labels");
    Longs text = get(sample, "text");
    for (size_t at = 0; at < text.size(); ++at)
      if (labels[at] >= 0) text[at] = labels[at];
    const bool swapped = get(sample, "is_random")[0] == 1;
    ++seen[swapped];
    EXPECT_THAT(text[1], swapped ? ::testing::AnyOf(20, 30) : ::testing::AnyOf(10, 10));
    EXPECT_EQ(get(sample, "truncated")[0], 0);
    size_t first_sep = 0;
    while (text[first_sep] != 3) ++first_sep;
    EXPECT_EQ(types[first_sep], 0);
    EXPECT_EQ(types[first_sep + 1], 1);
    EXPECT_EQ(text[7], 3);
    EXPECT_EQ(types[7], 1);
    EXPECT_EQ(types[8], 0);
  }
  EXPECT_GT(seen[0], 30);
  EXPECT_GT(seen[1], 30);
}

TEST(BertDataset, CutsTheLongerHalfAtEitherEnd) {
  Longs longer(30);
  std::iota(longer.begin(), longer.end(), 10);
  const BertDataset dataset = bert(small_tokens(), {{80, 82}, longer}, 12, {});
  for (int64_t i = 0; i < 50; ++i) {
    const Sample sample = dataset.sample(i);
    const Longs types = get(sample, "types"), labels = get(sample, "labels");
    EXPECT_EQ(get(sample, "truncated")[0], 1);
    const bool swapped = get(sample, "is_random")[0] == 1;
    EXPECT_EQ(std::count(types.begin(), types.end(), 1), swapped ? 3 : 11)
        << "the two tokens of the shorter half are all there";
  }
}

TEST(BertDataset, NeedsSpecialTokens) {
  MaskedTokens tokens = small_tokens();
  tokens.cls = tokens.mask = -1;
  EXPECT_THAT(error_of([&] { bert(tokens, {{10}}, 21, {}); }),
              HasSubstr("a vocabulary of 100 has no [CLS], [MASK], which samples of BERT need"));
}

TEST(T5Dataset, SpansBecomeSentinelsInOrder) {
  MaskedTokens tokens = small_tokens();
  std::reverse(tokens.sentinels.begin(), tokens.sentinels.end());  // 99, 98, ...: downwards
  tokens.decoder_start = tokens.pad;
  Longs text(20);
  std::iota(text.begin(), text.end(), 10);
  const MaskingOptions masking{.probability = 0.3, .max_ngram = 3, .geometric = true};
  bool neighbours = false;
  for (int64_t i = 0; i < 50; ++i) {
    const Sample sample = t5(tokens, {text}, 22, masking).sample(i);
    const Longs encoder = get(sample, "text_enc"), decoder = get(sample, "text_dec"),
                labels = get(sample, "labels");
    EXPECT_EQ(decoder[0], tokens.pad);
    EXPECT_EQ(sample.get<uint8_t>("dec_mask")[0], 1) << "the start counts as text";
    // The decoder's text put in the place of the sentinels gives the text back.
    Longs joined;
    size_t at = 1;
    int64_t next = 99;
    bool before = false;
    for (const int64_t id : encoder) {
      neighbours = neighbours || (before && id >= 90);
      before = id >= 90;
      if (id < 90) {
        if (id != 0) joined.push_back(id);
        continue;
      }
      EXPECT_EQ(id, next--);
      EXPECT_EQ(decoder[at++], id);
      while (at < decoder.size() && decoder[at] >= 10 && decoder[at] < 90)
        joined.push_back(decoder[at++]);
    }
    EXPECT_EQ(joined, text);
    EXPECT_EQ(labels[at - 1], tokens.eos);
    EXPECT_EQ(Longs(labels.begin(), labels.begin() + static_cast<std::ptrdiff_t>(at) - 1),
              Longs(decoder.begin() + 1, decoder.begin() + static_cast<std::ptrdiff_t>(at)));
    const auto loss_mask = sample.get<float>("loss_mask");
    EXPECT_EQ(std::count(loss_mask.begin(), loss_mask.end(), 1.0F), static_cast<int64_t>(at));
  }
  EXPECT_TRUE(neighbours) << "spans next to each other are not joined";
}

TEST(T5Dataset, SpecialTokensInsideASpanVanishWithIt) {
  // 51 continues 10 across the [SEP] of the text, so the span reaches from 10 to 51.
  const MaskingOptions masking{.probability = 0.5, .max_ngram = 1};
  bool seen = false;
  for (int64_t i = 0; i < 50 && !seen; ++i) {
    const Sample sample = t5(small_tokens(), {{10, 3, 51, 20}}, 22, masking).sample(i);
    const Longs encoder = get(sample, "text_enc"), decoder = get(sample, "text_dec");
    if (encoder[0] != 90) continue;
    seen = true;
    EXPECT_EQ(encoder,
              (Longs{90, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(Longs(decoder.begin(), decoder.begin() + 4), (Longs{2, 90, 10, 51}));
  }
  EXPECT_TRUE(seen);
}

TEST(T5Dataset, CutsBehindTheTarget) {
  const Sample sample =
      t5(small_tokens(), {{10, 11, 12}, {13, 14, 15}}, 4, {.max_ngram = 1}).sample(0);
  EXPECT_EQ(get(sample, "truncated")[0], 1);
  EXPECT_EQ(get(sample, "text_enc")[3], 13) << "0.15 x 4 has no room for a masked token";
  EXPECT_EQ(get(sample, "text_enc")[4], 0);
  EXPECT_EQ(get(sample, "labels")[0], 3);
  EXPECT_EQ(get(sample, "labels")[1], -1);
}

TEST(T5Dataset, NamesSamplesThatDoNotFit) {
  MaskedTokens tokens = small_tokens();
  Longs text(20);
  std::iota(text.begin(), text.end(), 10);
  const MaskingOptions masking{.probability = 0.4, .max_ngram = 1};
  tokens.sentinels.resize(3);
  EXPECT_THAT(error_of([&] { t5(tokens, {text}, 22, masking).sample(6); }),
              HasSubstr("one run: sample 6 of 20 tokens has 8 masked spans, a vocabulary of 100 "
                        "has 3 sentinels\nhint: give --vocab-extra-ids 9"));
  EXPECT_THAT(error_of([&] { t5(small_tokens(), {text}, 22, masking, 12).sample(6); }),
              HasSubstr("sample 6 of 20 tokens has 8 masked spans, which with 8 tokens take 17 "
                        "positions of the decoder, it has 12\nhint: give --decoder-seq-length 19"));
  tokens.sentinels.clear();
  EXPECT_THAT(error_of([&] { t5(tokens, {text}, 22, masking); }),
              HasSubstr("a vocabulary of 100 has no sentinels <extra_id_0>"));
}

TEST(T5Dataset, WarnsBelowWhatIsAlwaysSafe) {
  T5DatasetConfig config{.sequence_length = 512, .decoder_sequence_length = 128};
  MaskedTokens tokens = small_tokens();
  EXPECT_EQ(t5_needs(512, 0.15).sentinels, 76) << "round(0.15 x 510), half to even";
  EXPECT_THAT(t5_warning(config, tokens),
              HasSubstr("may need up to 76 sentinels and 153 positions of the decoder; there are "
                        "10 and 128, and the first sample that needs more ends the run\nhint: safe "
                        "are --vocab-extra-ids 76 and --decoder-seq-length 153"));
  tokens.sentinels.resize(76);
  EXPECT_THAT(t5_warning(config, tokens), HasSubstr("safe are --decoder-seq-length 153"));
  config.decoder_sequence_length = 153;
  EXPECT_EQ(t5_warning(config, tokens), "");
}

// Each document given by the lengths of its sentences.
void write_documents(const std::string& prefix, const std::vector<Longs>& documents) {
  IndexedDatasetBuilder builder(prefix, IndexedType::kUInt16);
  int64_t token = 10;
  for (const Longs& document : documents) {
    for (const int64_t length : document) {
      Longs ids(static_cast<size_t>(length));
      for (int64_t& id : ids) id = 10 + token++ % 30;
      builder.add_sequence(ids);
    }
    builder.end_document();
  }
  builder.finish();
}

class SentenceFileTest : public ::testing::Test {
 protected:
  std::unique_ptr<const SentenceSource> open(std::pair<double, double> bounds,
                                             int64_t min_sentences) {
    options.min_sentences = min_sentences;
    options.max_length = 20;
    options.cache_path = folder / "cache";
    return sentences_of_file(std::make_shared<const IndexedDataset>(folder / "data"), bounds,
                             Split::kTrain, std::nullopt, options);
  }
  TempFolder folder;
  SentenceSourceOptions options;
};

TEST_F(SentenceFileTest, SplitsDocumentsNotSentences) {
  write_documents(folder / "data", {{5, 5}, {5, 5, 5, 5, 5, 5}, {5, 5}, {5, 5}});
  SentenceRun run;
  int64_t sentences = 0;
  const auto half = open({0.5, 1.0}, 2);
  for (int64_t i = 0; i < half->size(); ++i) {
    half->read(i, run);
    sentences += static_cast<int64_t>(run.ends.size());
  }
  EXPECT_EQ(sentences, 4);
}

TEST_F(SentenceFileTest, SaysWhyASplitIsEmpty) {
  write_documents(folder / "data", {{600, 5}, {5}, {700, 9}, {}});
  EXPECT_THAT(error_of([&] { open({0.0, 1.0}, 2); }),
              HasSubstr("/data: the train split gives no sample from its 4 documents: 2 have a "
                        "sentence of more than 512 tokens, 2 have fewer than 2 sentences\nhint: "
                        "give more data or a larger share of --split"));
  EXPECT_THAT(error_of([&] { open({0.9, 0.95}, 2); }), HasSubstr("from its 0 documents\nhint"));
  EXPECT_EQ(open({0.0, 1.0}, 1)->size(), 1);
  write_documents(folder / "data", {{50}, {5}});
  EXPECT_THAT(error_of([&] { open({0.0, 1.0}, 2); }),
              HasSubstr("write it with preprocess-data --split-sentences, or give "
                        "--bert-no-binary-head"));
}

TEST_F(SentenceFileTest, CachesItsOrderAndMendsIt) {
  write_documents(folder / "data", {{5, 5}, {5, 5, 5}, {9, 9}});
  SentenceRun first, again;
  open({0.0, 1.0}, 1)->read(0, first);
  std::string index;
  for (const std::string& file : folder.files())
    if (file.ends_with("sentence_index.npy")) index = folder / file;
  ASSERT_FALSE(index.empty());
  std::string bytes = read_file(index);
  bytes.back() = static_cast<char>(bytes.back() + 1);
  write_file_atomically(index, bytes);
  ::testing::internal::CaptureStderr();
  open({0.0, 1.0}, 1)->read(0, again);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("building the sample order again"));
  EXPECT_EQ(first.tokens, again.tokens);
  EXPECT_EQ(first.target, again.target);
}

TEST_F(SentenceFileTest, NamesTokensOutsideOfTheVocabulary) {
  write_documents(folder / "data", {{5, 5}});
  options.vocab_size = 12;
  SentenceRun run;
  EXPECT_THAT(error_of([&] { open({0.0, 1.0}, 1)->read(0, run); }),
              HasSubstr("document 0, sequence 0, offset 4: token id 24 is outside the vocabulary "
                        "of 12"));
}

// The training split of mock data.
std::shared_ptr<const Dataset> mock_data(const MaskedModel& model,
                                         const TokenizerConfig& tokenizer_config, int64_t length,
                                         const MaskedDataConfig& masked = {}) {
  DataConfig data;
  data.mock_data = true;
  const auto tokenizer = make_tokenizer(tokenizer_config);
  DatasetRequest request;
  request.sequence_length = length;
  request.targets = {.train = 400, .valid = 0, .test = 0};
  request.tokenizer = facts_of(*tokenizer, tokenizer_config.tokenizer_type);
  request.text_tokenizer = tokenizer.get();
  return build_masked_datasets(model, data, masked, request).train;
}

TokenizerConfig null_tokenizer(int64_t vocab_size) {
  TokenizerConfig config;
  config.tokenizer_type = "NullTokenizer";
  config.vocab_size = vocab_size;
  return config;
}

TEST(MockMaskedData, HasPaddingHolesAndShortSamples) {
  for (const bool binary_head : {true, false}) {
    const auto dataset = mock_data({MaskedKind::kBert, binary_head}, null_tokenizer(64), 32);
    const int64_t most = dataset->columns()[dataset->columns().index("loss_mask")].most_counted;
    EXPECT_EQ(most, 4) << "0.15 x 29";
    int full = 0, holes = 0, padded = 0, truncated = 0, empty = 0;
    for (int64_t i = 0; i < dataset->size(); ++i) {
      const Sample sample = dataset->sample(i);
      const auto mask = sample.get<uint8_t>("padding_mask");
      size_t end = mask.size();
      while (end > 0 && mask[end - 1] == 0) --end;
      const size_t most = binary_head ? 32 : 31;  // one run takes one [SEP] less
      full += end == most;
      padded += end < most;
      holes += std::count(mask.begin(), mask.begin() + static_cast<std::ptrdiff_t>(end), 0) > 0;
      truncated += get(sample, "truncated")[0] == 1;
      const auto loss_mask = sample.get<float>("loss_mask");
      EXPECT_LE(std::count(loss_mask.begin(), loss_mask.end(), 1.0F), most);
      empty += std::count(loss_mask.begin(), loss_mask.end(), 1.0F) == 0;
      for (const int64_t id : get(sample, "text")) EXPECT_TRUE(id >= 0 && id < 64);
    }
    EXPECT_GT(full, 40);
    EXPECT_GT(padded, 40);
    EXPECT_GT(holes, 20);
    EXPECT_GT(truncated, 20);
    EXPECT_GT(empty, 0) << "samples without a masked token";
    EXPECT_EQ(get(dataset->sample(7), "text"), get(dataset->sample(7), "text"));
  }
}

// Each length as often, up to the longest that fits, and texts without holes, but for masked tokens
// that a random one replaces, which may be the padding token.
TEST(MockMaskedData, HasTextsOfGivenLengths) {
  MaskedDataConfig masked;
  masked.mock_lengths = {4, 40};
  masked.mlm_replace = {1.0, 0.0, 0.0};
  const auto dataset = mock_data({MaskedKind::kBert, true}, null_tokenizer(64), 32, masked);
  std::vector<int> found(33);
  for (int64_t i = 0; i < dataset->size(); ++i) {
    const auto mask = dataset->sample(i).get<uint8_t>("padding_mask");
    const auto end = std::find(mask.begin(), mask.end(), 0);
    EXPECT_EQ(std::count(end, mask.end(), 1), 0);
    ++found[static_cast<size_t>(end - mask.begin())];
  }
  EXPECT_EQ(std::accumulate(found.begin(), found.begin() + 7, 0), 0) << "4 tokens and 3 around";
  for (size_t length = 7; length < 32; ++length) EXPECT_GT(found[length], 0) << length;
  EXPECT_NEAR(found[32], 400.0 * 12 / 37, 40) << "29 to 40 tokens";
}

TEST(MockMaskedData, GivesSamplesOfT5) {
  const auto dataset =
      mock_data({.kind = MaskedKind::kT5, .decoder_seq_length = 16}, null_tokenizer(64), 32);
  int padded = 0;
  for (int64_t i = 0; i < dataset->size(); ++i) {
    const Sample sample = dataset->sample(i);
    for (const int64_t id : get(sample, "text_enc")) EXPECT_TRUE(id >= 0 && id < 64);
    const auto dec_mask = sample.get<uint8_t>("dec_mask");
    padded += std::count(dec_mask.begin(), dec_mask.end(), 0) > 0;
  }
  EXPECT_GT(padded, 40);
}

TEST(MaskedTokens, ComeFromTheTokenizer) {
  TempFolder folder;
  write_file_atomically(folder / "vocab.txt",
                        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n##s\n##\n");
  TokenizerConfig config;
  config.tokenizer_type = "BertWordPieceLowerCase";
  config.vocab_file = folder / "vocab.txt";
  MaskedTokens tokens = masked_tokens(*make_tokenizer(config), {});
  EXPECT_EQ((Longs{tokens.pad, tokens.cls, tokens.sep, tokens.mask}), (Longs{0, 2, 3, 4}));
  EXPECT_EQ((Longs{tokens.decoder_start, tokens.eos}), (Longs{2, 3}));
  EXPECT_EQ(Longs(tokens.continues_word.begin(), tokens.continues_word.end()),
            (Longs{0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_TRUE(tokens.sentinels.empty());
  config.tokenizer_type = "BertWordPieceCase";
  tokens = masked_tokens(*make_tokenizer(config), {});
  EXPECT_EQ(tokens.sentinels.size(), 100u);
  EXPECT_EQ(tokens.sentinels[0], 8);
  config.vocab_extra_ids = 3;
  tokens = masked_tokens(*make_tokenizer(config), {});
  EXPECT_EQ((Longs{tokens.decoder_start, tokens.eos}), (Longs{8, 9}));
  EXPECT_EQ(tokens.sentinels, (Longs{10, 11, 12}));
  EXPECT_EQ(tokens.replacements.size(), 13u);
  config = null_tokenizer(10);
  config.vocab_extra_ids = 3;
  EXPECT_THAT(error_of([&] { make_tokenizer(config); }),
              HasSubstr("--vocab-extra-ids 3 has no effect without a vocabulary of BERT"));
}

}  // namespace
}  // namespace megatron::testing_datasets
