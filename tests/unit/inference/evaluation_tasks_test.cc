// Requests from benchmark data files; tests/cli/evaluate_test.py compares with
// lm-evaluation-harness.
#include "megatron/inference/evaluation/evaluation_tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::ElementsAre;

class EvaluationTasksTest : public testing::Test {
 protected:
  EvaluationTasksTest() {
    folder_ = std::filesystem::temp_directory_path() /
              cat("evaluation_tasks_", ::getpid(), "_",
                  testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    TokenizerConfig config;
    config.tokenizer_type = "ByteLevelTokenizer";  // ids are bytes
    tokenizer_ = make_tokenizer(config);
  }
  ~EvaluationTasksTest() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& name, const std::string& text) const {
    write_file_atomically(folder_ / name, text);
    return (folder_ / name).string();
  }
  EvaluationTask read(const std::string& task, const std::string& text) const {
    return read_evaluation_task(task, file("data.jsonl", text));
  }
  // The message without the path of the file.
  std::string error_of(const std::string& task, const std::string& text) const {
    const std::string what = megatron::error_of([&] { read(task, text); });
    const std::string path = (folder_ / "data.jsonl").string();
    return what.starts_with(path) ? what.substr(path.size()) : what;
  }

  std::filesystem::path folder_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

std::string text_of(std::span<const int32_t> ids) { return {ids.begin(), ids.end()}; }

TEST_F(EvaluationTasksTest, HellaSwagIsCleaned) {
  const EvaluationTask task = read(
      "hellaswag",
      R"({"activity_label":"Tea ","ctx_a":"[header] Boil  water [title] Pour","ctx_b":"\u00c9LISE Waits","endings":["a [x] b","c"],"label":"1"})");
  EXPECT_EQ(task.examples[0].context, "Tea : Boil water. Pour \u00c9lise waits");
  EXPECT_THAT(task.examples[0].choices, ElementsAre("a b", "c"));
  EXPECT_EQ(task.examples[0].gold, 1u);
}

TEST_F(EvaluationTasksTest, ArcAsPublished) {
  const EvaluationTask task = read(
      "arc",
      R"({"question":{"stem":"Why?","choices":[{"text":"so","label":"A"},{"text":"not","label":"B"}]},"answerKey":"B"})");
  EXPECT_EQ(task.examples[0].context, "Question: Why?\nAnswer:");
  EXPECT_THAT(task.examples[0].choices, ElementsAre("so", "not"));
  EXPECT_EQ(task.examples[0].gold, 1u);
}

TEST_F(EvaluationTasksTest, RaceInItsThreeForms) {
  const std::string problems =
      R"({"article":"A.","problems":[{"question":"X is  _  .","options":["p","q"],"answer":"B"},{"question":"Y?","options":["r","s"],"answer":"A"}]})";
  const std::string lists =
      R"({"article":"A.","questions":["X is  _  .","Y?"],"options":[["p","q"],["r","s"]],"answers":["B","A"]})";
  for (const std::string& text : {problems, lists}) {
    const EvaluationExample example = read("race", text).examples[0];
    EXPECT_EQ(example.context, "Article: A.\n\nX is q\nY?");
    EXPECT_THAT(example.choices, ElementsAre("r", "s"));
    EXPECT_EQ(example.gold, 0u);
  }
  const EvaluationExample one =
      read("race", R"({"article":"A.","question":"Y?","options":["r","s"],"answer":"B"})")
          .examples[0];
  EXPECT_EQ(one.context, "Article: A.\n\nY?");
  EXPECT_EQ(one.gold, 1u);
}

TEST_F(EvaluationTasksTest, SpacesBeforeTheAnswerGoWithIt) {
  const EvaluationTask task = read("piqa", R"({"goal":"g","sol1":"one","sol2":"two","label":0})");
  EvaluationOptions options;
  options.max_length = 100;
  const EvaluationRequests requests = make_requests(task, *tokenizer_, options);
  ASSERT_EQ(requests.requests.size(), 2u);
  EXPECT_EQ(text_of(requests.requests[1].ids), "Question: g\nAnswer: two");
  EXPECT_EQ(requests.requests[1].num_scored, 4);

  EvaluationTask spaced = task;
  spaced.examples[0].context = "x \n";
  const EvaluationRequests moved = make_requests(spaced, *tokenizer_, options);
  EXPECT_EQ(text_of(moved.requests[0].ids), "x \n one");
  EXPECT_EQ(moved.requests[0].num_scored, 6);
}

TEST_F(EvaluationTasksTest, LongContextsLoseTheirBeginning) {
  const EvaluationTask task = read("lambada", R"({"text":"abcdefgh ij"})");
  EvaluationOptions options;
  options.max_length = 5;
  const EvaluationRequests requests = make_requests(task, *tokenizer_, options);
  EXPECT_EQ(text_of(requests.requests[0].ids), "fgh ij");
  EXPECT_EQ(requests.num_truncated, 1);
  options.max_length = 2;
  EXPECT_THROW(make_requests(task, *tokenizer_, options), Error);
}

TEST_F(EvaluationTasksTest, TheBeginningOfTextStandsBeforeContexts) {
  const EvaluationTask task = read("lambada", R"({"text":"a b"})");
  EvaluationOptions options;
  options.max_length = 10;
  options.prefix = 256;
  options.add_prefix_to_context = true;
  const EvaluationRequests requests = make_requests(task, *tokenizer_, options);
  EXPECT_THAT(requests.requests[0].ids, ElementsAre(256, 'a', ' ', 'b'));
  EXPECT_EQ(requests.requests[0].num_scored, 2);
}

// Every token is scored once; a window after the first sees max_length - stride tokens before its
// own.
TEST_F(EvaluationTasksTest, WindowsCoverADocumentOnce) {
  const EvaluationTask task = read_evaluation_task("perplexity", file("text.txt", "0123456789"));
  EvaluationOptions options;
  options.max_length = 4;
  options.prefix = 'P';
  const auto windows = [&] {
    std::vector<std::string> out;
    for (const ScoreRequest& request : make_requests(task, *tokenizer_, options).requests)
      out.push_back(text_of(request.ids) + "/" + std::to_string(request.num_scored));
    return out;
  };
  EXPECT_THAT(windows(), ElementsAre("P0123/4", "34567/4", "56789/2"));
  options.stride = 3;
  EXPECT_THAT(windows(), ElementsAre("P0123/4", "23456/3", "56789/3"));
  options.stride = 1;
  EXPECT_THAT(windows(), ElementsAre("P0123/4", "01234/1", "12345/1", "23456/1", "34567/1",
                                     "45678/1", "56789/1"));
  options.stride = 4;
  options.prefix.reset();
  EXPECT_THAT(windows(), ElementsAre("01234/4", "45678/4", "56789/1"));
  options.stride = 5;
  EXPECT_THROW(windows(), Error);
}

TEST_F(EvaluationTasksTest, FewShotExamplesOfTheSubject) {
  const auto line = [](const char* subject, const char* question, int answer) {
    return cat(R"({"question":")", question, R"(","choices":["a","b","c","d"],"answer":)", answer,
               R"(,"subject":")", subject, "\"}\n");
  };
  EvaluationTask task = read("mmlu", line("x_y", "Q1", 0) + line("z", "Q2", 1));
  const EvaluationTask shots = read_evaluation_task(
      "mmlu", file("dev.jsonl", line("z", "S1", 3) + line("x_y", "S2", 2) + line("z", "S3", 0)));
  add_few_shot_examples(task, shots, 1);
  EXPECT_EQ(task.examples[0].description,
            "The following are multiple choice questions (with answers) about x y.\n\n");
  EXPECT_EQ(task.examples[0].context,
            "S2\nA. a\nB. b\nC. c\nD. d\nAnswer: C\n\nQ1\nA. a\nB. b\nC. c\nD. d\nAnswer:");
  EXPECT_TRUE(task.examples[1].context.starts_with("S1\n"));
  EvaluationTask again = read("mmlu", line("x_y", "Q1", 0));
  try {
    add_few_shot_examples(again, shots, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              shots.file + ": holds 1 examples of the subject x_y, --num-fewshot is 2");
  }
}

TEST_F(EvaluationTasksTest, Metrics) {
  EvaluationTask task;
  task.normalized = true;
  task.examples.resize(2);
  task.examples[0].choices = {"\u00e9", "abcd"};  // one character of two bytes
  task.examples[0].gold = 1;
  task.examples[1].choices = {"ab", "abcd"};
  EvaluationRequests requests;
  requests.first = {0, 2, 4};
  requests.requests.resize(4);
  // Per character -3 and -1, per byte -1.5 and -1; -1 and -0.5.
  const std::vector<Score> scores = {{-3, false}, {-4, false}, {-2, false}, {-2, false}};
  const EvaluationResult result = evaluate(task, requests, scores);
  EXPECT_EQ(result.examples, 2);
  EXPECT_EQ(result.metrics[0].value, 0.5);  // the first of equals
  EXPECT_EQ(result.metrics[1].value, 0.5);
  EXPECT_EQ(result.metrics[2].value, 0.5);
  EXPECT_DOUBLE_EQ(*result.metrics[0].standard_error, 0.5);
  task.examples[0].choices = {"\u00e9\u00e9\u00e9", "abcd"};
  const std::vector<Score> close = {{-3.5, false}, {-4, false}, {-2, false}, {-2, false}};
  task.examples[0].gold = 0;  // -1.17 and -1 per character, -0.58 and -1 per byte
  const EvaluationResult bytes = evaluate(task, requests, close);
  EXPECT_EQ(bytes.metrics[1].value, 0.0);
  EXPECT_EQ(bytes.metrics[2].value, 0.5);
}

TEST_F(EvaluationTasksTest, WhatIsWrongIsNamedWithItsLine) {
  EXPECT_EQ(error_of("piqa", "\n{\"goal\": 1}"), ":2: \"goal\" is no string");
  EXPECT_EQ(error_of("piqa", "[1]"), ":1: expected a JSON object");
  EXPECT_EQ(error_of("piqa", "{\"goal\": \"a\""), ":1: expected a JSON object");
  EXPECT_EQ(error_of("piqa", R"({"goal":"a","sol1":"b","sol2":"c"})"), ":1: no field \"label\"");
  EXPECT_EQ(error_of("piqa", R"({"goal":"a","sol1":"b","sol2":"c","label":2})"),
            ":1: \"label\" is 2, which names none of 2 choices");
  EXPECT_EQ(error_of("piqa", R"({"goal":"a","sol1":"","sol2":"c","label":1})"),
            ":1: a text to score is empty");
  EXPECT_EQ(
      error_of("hellaswag",
               R"({"activity_label":"a","ctx_a":"b","ctx_b":"c","endings":["d"],"label":""})"),
      ":1: \"label\" is \"\", which names none of 1 choices\nhint: files without answers cannot be "
      "scored");
  EXPECT_EQ(
      error_of("arc",
               R"({"question":"a","choices":{"text":["b"],"label":["A","B"]},"answerKey":"A"})"),
      ":1: \"choices\": 1 texts, but 2 labels");
  EXPECT_EQ(
      error_of("arc", R"({"question":"a","choices":{"text":["b"],"label":["A"]},"answerKey":"B"})"),
      ":1: \"answerKey\" is \"B\", which is none of the labels");
  EXPECT_EQ(error_of("mmlu", R"({"question":"a","choices":["b"],"answer":0})"),
            ":1: \"choices\" has 1 entries, expected 4");
  EXPECT_EQ(error_of("race", R"({"article":"a","problems":[]})"),
            ":1: \"problems\" is no list of objects");
  EXPECT_EQ(error_of("race", R"({"article":"a","questions":["b"],"options":[],"answers":[]})"),
            ":1: \"questions\", \"options\" and \"answers\" differ in length");
  EXPECT_EQ(error_of("lambada", R"({"text":"word"})"),
            ":1: \"text\" has no last word after a space");
  EXPECT_EQ(error_of("lambada", "\n \n"), ": holds no examples");
  EXPECT_EQ(error_of("boolq", "{}"),
            "unknown task boolq\nhint: the tasks are perplexity, lambada, hellaswag, arc, piqa, "
            "mmlu, race");
}

}  // namespace
}  // namespace megatron
