// Files of multiple-choice questions as RACE has them, and the samples that they make.
#include "megatron/datasets/tuning/multiple_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "tests/unit/datasets/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

class MultipleChoice : public testing::Test {
 protected:
  std::vector<ChoiceQuestion> read(const std::string& content, int64_t choices = 4) const {
    write_file_atomically(folder_ / "race.jsonl", content);
    return read_choice_questions(folder_ / "race.jsonl", choices);
  }
  std::string error(const std::string& content) const {
    const std::string what = error_of([&] { read(content, 2); });
    return what.substr(std::min(what.size(), folder_.path().size() + 1));
  }

  const testing_datasets::TempFolder folder_;
};

TEST_F(MultipleChoice, ReadsRace) {
  const auto questions = read(
      "{\"article\": \"A  cat\\nsat . It ran.\", \"questions\": [\"The _ sat on _.\", \"Who  "
      "ran?\"],"
      " \"options\": [[\"cat\", \"dog\", \"mat\", \"rat\"], [\"a\", \"b\", \"c\", \"d\"]],"
      " \"answers\": [\"C\", \"A\"], \"id\": \"high1.txt\"}\n\n"
      "{\"article\": \"x\", \"questions\": [\"q\"], \"options\": [[\"a\", \"b\", \"c\", \"d\"]]}");
  ASSERT_EQ(questions.size(), 3U);
  EXPECT_EQ(questions[0].article, "A cat sat. It ran.");
  EXPECT_EQ(questions[0].texts,
            (std::vector<std::string>{"The cat sat on cat.", "The dog sat on dog.",
                                      "The mat sat on mat.", "The rat sat on rat."}));
  EXPECT_EQ(questions[0].answer, 2);
  EXPECT_EQ(questions[1].texts.at(3), "Who ran? d");
  EXPECT_EQ(questions[1].answer, 0);
  EXPECT_FALSE(questions[2].answer.has_value());
}

TEST_F(MultipleChoice, FaultsNameFileAndLine) {
  const auto line = [](const char* questions, const char* options, const char* more = "") {
    return cat("{\"article\": \"a\", \"questions\": ", questions, ", \"options\": ", options, more,
               "}");
  };
  EXPECT_EQ(error("\n[1]\n"), "race.jsonl:2: expected a JSON object");
  EXPECT_EQ(error("{\"questions\": []}"),
            "race.jsonl:1: nothing under \"article\"\nhint: a line is an article of RACE, "
            "{\"article\", \"questions\", \"options\", \"answers\"}");
  EXPECT_EQ(error("{\"article\": 1}"), "race.jsonl:1: no string under \"article\"");
  EXPECT_EQ(error(line("\"q\"", "[]")), "race.jsonl:1: no list of strings under \"questions\"");
  EXPECT_EQ(error(line("[\"q\"]", "[]")),
            "race.jsonl:1: \"options\" is no list of as many as \"questions\", 1");
  EXPECT_EQ(error(line("[\"q\"]", "[[1, 2]]")),
            "race.jsonl:1: no list of strings under \"options\" of question 1");
  EXPECT_EQ(error(line("[\"q\"]", "[[\"a\", \"b\", \"c\"]]")),
            "race.jsonl:1: question 1 has 3 choices, --bert-choices is 2");
  EXPECT_EQ(error(line("[\"q\"]", "[[\"a\", \"b\"]]", ", \"answers\": [\"C\"]")),
            "race.jsonl:1: answer \"C\" of question 1 is no letter of one of its 2 choices, A for "
            "the first");
  EXPECT_EQ(error(line("[\"q\"]", "[[\"a\", \"b\"]]", ", \"answers\": []")),
            "race.jsonl:1: \"answers\" is no list of as many as \"questions\", 1");
  EXPECT_EQ(error("\n"), "race.jsonl: holds no questions");
}

// A question with its choice is cut alone, then the article.
TEST_F(MultipleChoice, TextsAreCutAsMegatronCutsThem) {
  std::string vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n";
  write_file_atomically(folder_ / "vocab.txt", vocabulary);
  TokenizerConfig config;
  config.tokenizer_type = "BertWordPieceLowerCase";
  config.vocab_file = folder_ / "vocab.txt";
  const auto tokenizer = make_tokenizer(config);
  ChoiceQuestion question;
  std::string longer;
  for (int64_t i = 0; i < kMostQuestionTokens + 9; ++i) longer += "a ";
  question.texts = {longer, "a"};
  question.article = "b b b";
  question.answer = 1;
  const std::vector<LabelledText> texts = texts_of_choices({question});
  ASSERT_EQ(texts.size(), 2U);
  const PairTokens cut = encode_pair(*tokenizer, texts[0], 200),
                   whole = encode_pair(*tokenizer, texts[1], 200);
  EXPECT_EQ(cut.first_of_b, 1 + kMostQuestionTokens + 1);
  EXPECT_EQ(std::ssize(cut.ids), cut.first_of_b + 4);
  EXPECT_EQ(cut.ids[static_cast<size_t>(kMostQuestionTokens)], 5);
  EXPECT_EQ(cut.ids[static_cast<size_t>(kMostQuestionTokens) + 1], 3);
  EXPECT_EQ(whole.ids, (std::vector<int32_t>{2, 5, 3, 6, 6, 6, 3}));
  EXPECT_EQ(texts[0].label, 1);
}

TEST(MultipleChoiceDataset, ShufflesQuestionsWithTheirChoices) {
  std::vector<LabelledTokens> rows;
  for (int32_t i = 0; i < 15; ++i) rows.push_back({{{i}, 1}, static_cast<float>(i / 3)});
  const LabelledDatasetConfig config{.sequence_length = 2, .group = 3};
  const LabelledTextDataset set(rows, 30, config);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < 30; i += 3) {
    const int64_t first = set.sample(i).get<int64_t>("text")[0];
    EXPECT_EQ(first % 3, 0);
    for (int64_t k = 0; k < 3; ++k) EXPECT_EQ(set.sample(i + k).get<int64_t>("text")[0], first + k);
    order.push_back(first / 3);
  }
  EXPECT_EQ(std::set<int64_t>(order.begin(), order.begin() + 5).size(), 5U);
  EXPECT_EQ(std::set<int64_t>(order.begin() + 5, order.end()).size(), 5U);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.begin() + 5) &&
               std::is_sorted(order.begin() + 5, order.end()));
  rows.pop_back();
  EXPECT_EQ(error_of([&] { LabelledTextDataset(rows, 30, config); }),
            "there are 14 texts, not a multiple of 3");
}

}  // namespace
}  // namespace megatron
