// Scores of answers next to those of lmms-eval (tests/golden/evaluate/make_answer_scores.py), and
// the tasks that they belong to.
#include "megatron/inference/evaluation/answer_scores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/inference/evaluation/question_tasks.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::ElementsAre;

TEST(AnswerScores, AreThoseOfThePublishedFunctions) {
  const auto rows = nlohmann::json::parse(
      read_file(MEGATRON_SOURCE_DIR "/tests/golden/evaluate/answer_scores.json"));
  size_t of_people = 0;
  for (const auto& row : rows) {
    const std::string answer = row["answer"];
    const std::vector<std::string> right = row["right"];
    EXPECT_NEAR(anls_score(answer, right), row["anls"].get<double>(), 1e-12) << answer;
    EXPECT_EQ(relaxed_score(answer, right), row["relaxed"].get<double>()) << answer;
    if (!row.contains("vqa")) continue;
    EXPECT_NEAR(vqa_score(answer, right), row["vqa"].get<double>(), 1e-12) << answer;
    ++of_people;
  }
  EXPECT_GT(of_people, 5U);
}

TEST(AnswerScores, OfPeople) {
  const std::vector<std::string> right = {"Dog", "a dog", "dog!", "x", "x",
                                          "x",   "x",     "x",    "x", "x"};
  EXPECT_NEAR(vqa_score("the dog.", right), 0.9, 1e-12);
  EXPECT_EQ(vqa_score("cat", std::vector<std::string>{"cat"}), 1);
  EXPECT_EQ(vqa_score("cat", std::vector<std::string>{"cat", "cat"}), 1);
  EXPECT_EQ(vqa_text("The 3.5-inch,  None! A ten\n1,000 (an) o'clock"),
            "3.5 inch 0 10 1,000 o'clock");
}

TEST(AnswerScores, Exact) {
  const std::vector<std::string> right = {"Blue ", "sky"};
  EXPECT_EQ(exact_score(" Blue\n", right), 1);
  EXPECT_EQ(exact_score("blue", right), 0);
}

class QuestionTasks : public testing::Test {
 protected:
  QuestionTasks()
      : folder_(std::filesystem::temp_directory_path() / cat("question_tasks_", ::getpid())) {
    std::filesystem::create_directories(folder_);
    write_file_atomically(folder_ / "a.png", "not looked at");
  }
  ~QuestionTasks() override { std::filesystem::remove_all(folder_); }

  QuestionTask read(const std::string& task, const std::string& text) const {
    write_file_atomically(folder_ / "q.jsonl", text);
    return read_question_task(task, (folder_ / "q.jsonl").string(), "");
  }
  std::string refusal(const std::string& task, const std::string& text) const {
    const std::string message = error_of([&] { read(task, text); });
    const size_t at = message.find("q.jsonl");
    return at == std::string::npos ? message : message.substr(at);
  }

  std::filesystem::path folder_;
};

TEST_F(QuestionTasks, ReadsTheFieldsOfPublicBenchmarks) {
  const QuestionTask vqa = read(
      "vqa", R"({"image": "a.png", "question": "What?", "answers": [{"answer": "cat"}, "dog"]})"
             "\n"
             R"({"images": ["a.png", "a.png"], "query": "How many?", "label": 3})");
  ASSERT_EQ(vqa.questions.size(), 2U);
  EXPECT_THAT(vqa.questions[0].answers, ElementsAre("cat", "dog"));
  EXPECT_EQ(vqa.questions[0].text, "What?");
  EXPECT_EQ(vqa.questions[0].sample.places.at(0).size, 13U);
  EXPECT_THAT(vqa.questions[1].answers, ElementsAre("3"));
  EXPECT_EQ(vqa.questions[1].sample.row.media.size(), 2U);
  const QuestionTask choices = read(
      "choices",
      R"({"question": "Q {x} {question}", "choices": ["u", "v {question}"], "answer": "B"})"
      "\n"
      R"({"question": "q", "choices": ["u", "v"], "answer": "u"})"
      "\n"
      R"({"messages": [{"role": "user", "content": "q"}], "choices": ["u", "v"], "label": 1})");
  EXPECT_THAT((std::vector{choices.questions[0].gold, choices.questions[1].gold,
                           choices.questions[2].gold}),
              ElementsAre(1, 0, 1));
  EXPECT_EQ(question_text(choices.questions[0], "{question}\n{choices}\n{"),
            "Q {x} {question}\nA. u\nB. v {question}\n{");
  EXPECT_THAT(scored_choices(choices.questions[0], "{question}"), ElementsAre("u", "v {question}"));
  EXPECT_THAT(scored_choices(choices.questions[0], "{question} {choices}"), ElementsAre("A", "B"));
  EXPECT_TRUE(choices.questions[2].text.empty());
}

TEST_F(QuestionTasks, NamesRowAndField) {
  EXPECT_EQ(refusal("vqa", "{}"), "q.jsonl: line 1: no field \"question\" or \"query\"");
  EXPECT_EQ(refusal("vqa", R"({"question": "q"})"),
            "q.jsonl: line 1: no field \"answers\" or \"answer\" or \"label\"");
  EXPECT_EQ(refusal("anls", R"({"question": "q", "answers": []})"),
            "q.jsonl: line 1: has no answers\nhint: questions without cannot be scored");
  EXPECT_EQ(refusal("anls", R"({"question": "q", "answers": [[1]]})"),
            "q.jsonl: line 1: an answer is [1]; expected a text, or an object with \"answer\"");
  EXPECT_EQ(refusal("choices", R"({"question": "q", "choices": ["a"], "answer": 0})"),
            "q.jsonl: line 1: has 1 choices; expected a list of 2 to 26 texts");
  EXPECT_EQ(refusal("choices", R"({"question": "q", "choices": ["a", "b"], "answer": "C"})"),
            "q.jsonl: line 1: the answer is \"C\", which names none of 2 choices");
  EXPECT_EQ(
      refusal("exact", R"({"messages": [{"role": "assistant", "content": "a"}], "answer": "a"})"),
      "q.jsonl: line 1: the last message is the assistant's\nhint: leave it out; what counts "
      "as right is in \"answers\"");
  EXPECT_THAT(refusal("vqa", R"({"image": "b.png", "question": "q", "answer": "a"})"),
              testing::StartsWith("q.jsonl: line 1: there is no file "));
  EXPECT_EQ(refusal("vqa", ""), "q.jsonl: holds no questions");
}

TEST(AnswerMetrics, HaveAMeanAndItsError) {
  QuestionTask task{"anls", "f", {}};
  const std::vector<double> scores = {1, 0.5, 0, 0.5};
  const EvaluationResult result = evaluate_answers(task, scores);
  EXPECT_EQ(result.metrics.at(0).name, "anls");
  EXPECT_NEAR(result.metrics[0].value, 0.5, 1e-12);
  EXPECT_NEAR(result.metrics[0].standard_error.value(), std::sqrt(0.5 / 3 / 4), 1e-12);
}

}  // namespace
}  // namespace megatron
