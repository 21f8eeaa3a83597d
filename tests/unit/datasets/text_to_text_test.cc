// Pairs of texts that an encoder-decoder learns from: files, and the samples that they make.
#include "megatron/datasets/tuning/text_to_text.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/base/files.h"
#include "tests/unit/datasets/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

class TextToTexts : public testing::Test {
 protected:
  std::string file(const std::string& content) const {
    write_file_atomically(folder_ / "pairs.jsonl", content);
    return folder_ / "pairs.jsonl";
  }
  TextToTextFile encode(const std::string& content, const TextToTextLengths& lengths,
                        std::optional<int64_t> pad = 0) const {
    TokenizerConfig config;
    config.tokenizer_type = "NullTokenizer";
    config.vocab_size = 10;
    config.null_tokenizer_eod_id = 1;
    config.null_tokenizer_pad_id = pad;
    return encode_text_to_text(file(content), *make_tokenizer(config), lengths);
  }
  std::string error(const std::string& content) const {
    const std::string what = error_of([&] { encode(content, {9, 9}); });
    return what.substr(std::min(what.size(), folder_.path().size() + 1));
  }

  const testing_datasets::TempFolder folder_;
};

using Ids = std::vector<int32_t>;

TEST_F(TextToTexts, EndBothTexts) {
  const TextToTextFile read = encode(
      "{\"input\": \"2 3\", \"target\": \"4 5\", \"id\": 7}\n\n"
      "{\"input\": \"\", \"target\": \"\"}",
      {9, 9});
  ASSERT_EQ(read.rows.size(), 2U);
  EXPECT_EQ(read.rows[0].input, (Ids{2, 3, 1}));
  EXPECT_EQ(read.rows[0].target, (Ids{4, 5, 1}));
  EXPECT_EQ(read.rows[1].input, Ids{1});
  EXPECT_EQ(read.rows[1].target, Ids{1});
  EXPECT_EQ(read.inputs_cut + read.targets_cut, 0);
}

// An input that is cut has an end, a target has none: the text goes on there.
TEST_F(TextToTexts, LongOnesLoseTheirEnd) {
  const TextToTextFile read = encode(
      "{\"input\": \"2 3 4\", \"target\": \"5 6\"}\n{\"input\": \"2 3\", \"target\": \"5 6 7\"}\n",
      {3, 3});
  EXPECT_EQ(read.rows[0].input, (Ids{2, 3, 1}));
  EXPECT_EQ(read.rows[0].target, (Ids{5, 6, 1}));
  EXPECT_EQ(read.rows[1].input, (Ids{2, 3, 1}));
  EXPECT_EQ(read.rows[1].target, (Ids{5, 6, 7}));
  EXPECT_EQ(read.inputs_cut, 1);
  EXPECT_EQ(read.targets_cut, 1);
}

TEST_F(TextToTexts, FaultsNameFileAndLine) {
  const std::string hint = "\nhint: {\"input\": \"...\", \"target\": \"...\"}";
  EXPECT_EQ(error("\n[1]\n"), "pairs.jsonl:2: expected a JSON object" + hint);
  EXPECT_EQ(error("{\"input\": \"2"), "pairs.jsonl:1: expected a JSON object" + hint);
  EXPECT_EQ(error("{\"text\": \"2\"}"), "pairs.jsonl:1: nothing under \"input\"" + hint);
  EXPECT_EQ(error("{\"input\": 2}"), "pairs.jsonl:1: \"input\" is no string");
  EXPECT_EQ(error("{\"input\": \"2\", \"target\": [\"3\"]}"),
            "pairs.jsonl:1: \"target\" is no string");
  EXPECT_EQ(error("{\"input\": \"2\", \"target\": \"3\"}\n{\"input\": \"2\", \"target\": null}"),
            "pairs.jsonl:2: no \"target\" to train on");
  EXPECT_EQ(error("\n"), "pairs.jsonl: holds no texts");
}

TEST_F(TextToTexts, WithoutTargetsAreRead) {
  const std::vector<TextToText> texts =
      read_text_to_text(file("{\"input\": \"2\"}\n\n{\"input\": \"3\", \"target\": \"4\"}\n"));
  ASSERT_EQ(texts.size(), 2U);
  EXPECT_FALSE(texts[0].target.has_value());
  EXPECT_EQ(texts[1].target, "4");
  EXPECT_EQ(texts[1].line, 3);
}

TEST(TextToTextDataset, ShufflesEachEpoch) {
  DatasetRequest request;
  request.tokenizer.vocab_size = 50;
  const TextToTextLengths lengths{10, 6};
  const std::vector<TextToTextTokens> rows = mock_text_to_text(request, Split::kTrain, 8, lengths);
  ASSERT_EQ(rows.size(), 8U);
  const TextToTextDataset in_order(rows, 0, {.lengths = lengths}),
      shuffled(rows, 16, {.lengths = lengths});
  ASSERT_EQ(in_order.size(), 8);
  ASSERT_EQ(shuffled.size(), 16);
  EXPECT_NE(in_order.fingerprint(), shuffled.fingerprint());
  const auto texts = [](const Dataset& set, int64_t first) {
    std::vector<std::vector<int64_t>> all;
    for (int64_t i = first; i < first + 8; ++i) {
      all.push_back(set.sample(i).get<int64_t>("text_enc"));
      const std::vector<int64_t> labels = set.sample(i).get<int64_t>("labels");
      all.back().insert(all.back().end(), labels.begin(), labels.end());
    }
    return all;
  };
  auto plain = texts(in_order, 0), first = texts(shuffled, 0), second = texts(shuffled, 8);
  EXPECT_NE(first, plain);
  EXPECT_NE(first, second);
  for (auto* epoch : {&plain, &first, &second}) std::sort(epoch->begin(), epoch->end());
  EXPECT_EQ(first, plain);
  EXPECT_EQ(second, plain);
}

TEST(TextToTextDataset, OtherSplitsHaveOtherMockRows) {
  DatasetRequest request;
  request.tokenizer.vocab_size = 50;
  const auto inputs = [&](Split split) {
    std::vector<std::vector<int32_t>> all;
    for (const auto& row : mock_text_to_text(request, split, 4, {10, 6})) {
      EXPECT_TRUE(!row.input.empty() && row.input.size() <= 10);
      EXPECT_TRUE(!row.target.empty() && row.target.size() <= 6);
      all.push_back(row.input);
    }
    return all;
  };
  EXPECT_NE(inputs(Split::kTrain), inputs(Split::kValid));
  EXPECT_EQ(inputs(Split::kTrain), inputs(Split::kTrain));
}

}  // namespace
}  // namespace megatron
