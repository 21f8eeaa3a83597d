// Files of classes of texts, in GLUE's forms and as JSON lines, and the samples that they make.
#include "megatron/datasets/tuning/labelled_texts.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/base/files.h"
#include "tests/unit/datasets/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

class LabelledTexts : public testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& content) const {
    write_file_atomically(folder_ / name, content);
    return folder_ / name;
  }
  LabelledFile read(const std::string& name, const std::string& content,
                    LabelOptions options = {}) const {
    return read_labelled_texts(file(name, content), options);
  }
  std::string error(const std::string& name, const std::string& content,
                    LabelOptions options = {}) const {
    const std::string what = error_of([&] { read(name, content, options); });
    return what.substr(std::min(what.size(), folder_.path().size() + 1));
  }

  const testing_datasets::TempFolder folder_;
};

constexpr const char* kMnliHead =
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
    "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n";

TEST_F(LabelledTexts, ReadsTheFilesOfGlue) {
  const LabelledFile mnli =
      read("mnli.tsv", cat(kMnliHead, "0\t1\t2\tg\tp\tp\tp\tp\tA  b\tC . d\tneutral\tneutral\n"),
           {.classes = 3});
  ASSERT_EQ(mnli.texts.size(), 1U);
  EXPECT_EQ(mnli.texts[0].text, "A b");
  EXPECT_EQ(mnli.texts[0].text_b, "C. d");
  EXPECT_EQ(mnli.texts[0].label, 2);
  // Rows of another width and with an empty text are left out of QQP alone.
  const LabelledFile qqp = read("qqp.tsv",
                                "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
                                "1\t2\t3\tWho?\tWhat?\t1\n1\t2\t3\tWho?\n1\t2\t3\t\tWhat?\t0\n");
  ASSERT_EQ(qqp.texts.size(), 1U);
  EXPECT_EQ(qqp.num_skipped, 2);
  EXPECT_EQ(qqp.texts[0].label, 1);
  const LabelledFile cola = read("cola.tsv", "gj04\t1\t\tGood one.\ngj04\t0\t*\tBad\n");
  ASSERT_EQ(cola.texts.size(), 2U);
  EXPECT_EQ(cola.texts[1].text, "Bad");
  EXPECT_FALSE(cola.texts[1].text_b.has_value());
  EXPECT_EQ(cola.texts[1].label, 0);
  const LabelledFile sst = read("sst.tsv", "sentence\tlabel\nfine\t1\r\n");
  EXPECT_EQ(sst.texts.at(0).label, 1);
  const LabelledFile sts =
      read("sts.tsv", "index\tsentence1\tsentence2\tscore\n0\ta\tb\t2.75\n", {.classes = 1});
  EXPECT_EQ(sts.texts.at(0).label, 2.75);
  const LabelledFile mrpc =
      read("mrpc.tsv", "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tx\ty\n");
  EXPECT_EQ(mrpc.texts.at(0).text_b, "y");
  const LabelledFile qnli =
      read("qnli.tsv", "index\tquestion\tsentence\tlabel\n0\tq\ts\tnot_entailment\n",
           {.labels = {"entailment", "not_entailment"}});
  EXPECT_EQ(qnli.texts.at(0).text, "q");
  EXPECT_EQ(qnli.texts.at(0).text_b, "s");
  EXPECT_EQ(qnli.texts.at(0).label, 1);
  const LabelledFile unlabelled = read("test.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n");
  EXPECT_FALSE(unlabelled.texts.at(0).label.has_value());
}

TEST_F(LabelledTexts, ReadsJsonLines) {
  const LabelledFile lines =
      read("a.jsonl",
           "{\"text\": \"a\", \"label\": 1}\n\n{\"text\": \"b\", \"text_b\": \"c\", \"label\": "
           "\"0\"}\n");
  ASSERT_EQ(lines.texts.size(), 2U);
  EXPECT_EQ(lines.texts[0].label, 1);
  EXPECT_EQ(lines.texts[1].text_b, "c");
  EXPECT_EQ(lines.texts[1].label, 0);
}

TEST_F(LabelledTexts, FaultsNameFileAndLine) {
  EXPECT_EQ(error("a.tsv", "sentence\tlabel\nfine\t1\nbad\t2\n"),
            "a.tsv:3: label \"2\" is none of the 2 classes\nhint: 0 to 1, or name them with "
            "--labels");
  EXPECT_EQ(error("b.tsv", "sentence\tlabel\nfine\t1\t1\n"),
            "b.tsv:2: has 3 columns, the first line has 2");
  EXPECT_EQ(error("c.tsv", "words\tlabel\nfine\t1\n"),
            "c.tsv:1: names no columns of GLUE: \"words, label\"\nhint: sentence1, sentence2 and "
            "label for example; other texts as JSON lines, {\"text\", \"text_b\", \"label\"}");
  EXPECT_EQ(
      error("d.jsonl", "{\"text\": \"a\", \"label\": \"maybe\"}\n", {.labels = {"no", "yes"}}),
      "d.jsonl:1: label \"maybe\" is none of the 2 classes\nhint: --labels names no, yes");
  EXPECT_EQ(error("e.jsonl", "{\"text\": \"a\", \"label\": 0.5}\n"),
            "e.jsonl:1: label \"0.5\" is none of the 2 classes\nhint: 0 to 1, or name them with "
            "--labels");
  EXPECT_EQ(error("f.jsonl", "{\"text\": \"a\", \"label\": \"x\"}\n", {.classes = 1}),
            "f.jsonl:1: label \"x\" is no number, and --bert-classes 1 predicts one");
  EXPECT_EQ(error("g.jsonl", "{\"txt\": \"a\"}\n"), "g.jsonl:1: no string under \"text\"");
  EXPECT_EQ(error("h.jsonl", "[1]\n"), "h.jsonl:1: expected a JSON object");
  EXPECT_EQ(error("i.tsv", "sentence\tlabel\n"), "i.tsv: holds no texts");
}

TEST(CleanText, IsMegatrons) {
  EXPECT_EQ(clean_text(" a\n\tb . c . . . d "), " a b. c. .. d ");
  EXPECT_EQ(clean_text("a\xE3\x80\x80 b"), "a b");  // an ideographic space
}

TEST_F(LabelledTexts, PairsLoseTheirEnd) {
  TokenizerConfig config;
  config.tokenizer_type = "BertWordPieceLowerCase";
  config.vocab_file = file("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n");
  const auto tokenizer = make_tokenizer(config);
  const auto ids = [&](const char* text, std::optional<std::string> text_b, int64_t most) {
    const PairTokens pair = encode_pair(*tokenizer, {text, std::move(text_b), {}}, most);
    EXPECT_LE(std::ssize(pair.ids), most);
    return std::pair{pair.ids, pair.first_of_b};
  };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(ids("a b", {}, 9), (std::pair{Ids{2, 5, 6, 3}, int64_t{4}}));
  EXPECT_EQ(ids("a b", {}, 4), (std::pair{Ids{2, 5, 6, 3}, int64_t{4}}));
  EXPECT_EQ(ids("a b c", {}, 4), (std::pair{Ids{2, 5, 6, 3}, int64_t{4}}));
  EXPECT_EQ(ids("a", "b c", 9), (std::pair{Ids{2, 5, 3, 6, 7, 3}, int64_t{3}}));
  EXPECT_EQ(ids("a", "b c", 6), (std::pair{Ids{2, 5, 3, 6, 7, 3}, int64_t{3}}));
  EXPECT_EQ(ids("a", "b c", 5), (std::pair{Ids{2, 5, 3, 6, 3}, int64_t{3}}));
}

TEST(LabelledDataset, ShufflesEachEpoch) {
  const std::vector<LabelledTokens> rows = mock_labelled(8, 1, 50, 3, 10);
  for (const LabelledTokens& row : rows) {
    EXPECT_GE(row.tokens.first_of_b, 1);
    EXPECT_LE(row.tokens.first_of_b, std::ssize(row.tokens.ids));
  }
  const LabelledDatasetConfig config{.sequence_length = 10, .pad = 7};
  const LabelledTextDataset in_order(rows, 0, config), shuffled(rows, 16, config);
  EXPECT_EQ(in_order.size(), 8);
  const auto texts = [](const Dataset& set, int64_t first) {
    std::vector<std::vector<int64_t>> all;
    for (int64_t i = first; i < first + 8; ++i) all.push_back(set.sample(i).get<int64_t>("text"));
    return all;
  };
  auto plain = texts(in_order, 0), first = texts(shuffled, 0), second = texts(shuffled, 8);
  EXPECT_NE(first, plain);
  EXPECT_NE(first, second);
  for (auto* epoch : {&plain, &first, &second}) std::sort(epoch->begin(), epoch->end());
  EXPECT_EQ(first, plain);
  EXPECT_EQ(second, plain);
  for (int64_t i = 0; i < 8; ++i) {
    const Sample sample = in_order.sample(i);
    const auto& [tokens, label] = rows[static_cast<size_t>(i)];
    const auto text = sample.get<int64_t>("text"), types = sample.get<int64_t>("types");
    const auto mask = sample.get<uint8_t>("padding_mask");
    for (size_t k = 0; k < text.size(); ++k) {
      const bool inside = k < tokens.ids.size();
      EXPECT_EQ(text[k], inside ? tokens.ids[k] : 7);
      EXPECT_EQ(types[k], inside && static_cast<int64_t>(k) >= tokens.first_of_b ? 1 : 0);
      EXPECT_EQ(mask[k], inside ? 1 : 0);
    }
    EXPECT_EQ(sample.get<float>("target")[0], label);
    EXPECT_EQ(label, static_cast<float>(i % 3));
  }
}

}  // namespace
}  // namespace megatron
