// What `megatron evaluate` measures: data files of public benchmarks as texts to score, and scores
// as metrics.
//
// Prompts and metrics are those of lm-evaluation-harness (EleutherAI), so that numbers can be
// compared:
//   perplexity   .txt: a file is one document; .jsonl: {"text"} or {"page"}
//   lambada      {"text"}: the last word, after the last space
//   hellaswag    {"ctx_a", "ctx_b", "activity_label", "endings", "label"}
//   arc          {"question", "choices": {"text", "label"}, "answerKey"}, or that nested as AI2
//                publishes it
//   piqa         {"goal", "sol1", "sol2", "label"}
//   mmlu         {"question", "choices" (4), "answer" (0..3 or A..D), "subject" (optional)}
//   race         {"article", "question", "options", "answer"}, or several: "problems", or
//                "questions", "options", "answers"
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/inference/evaluation/scoring.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

enum class EvaluationKind { kPerplexity, kLastWord, kChoices };

// One example: a context and the texts that may follow it.
struct EvaluationExample {
  std::string where;                 // "file:12"
  std::string description;           // stands before few-shot examples and the context
  std::string context;               // empty: a document of kPerplexity
  std::vector<std::string> choices;  // what may follow it; the space before them is `delimiter`
  std::string delimiter = " ";
  size_t gold = 0;
  std::string group;  // subject of MMLU
  int64_t words = 0;  // kPerplexity: of the document, by white space
};

struct EvaluationTask {
  std::string name;
  EvaluationKind kind = EvaluationKind::kChoices;
  bool normalized = false;  // choices differ in length: acc_norm and acc_bytes say something
  std::string file;
  std::vector<EvaluationExample> examples;
};

// "perplexity, lambada, ..."
std::string evaluation_task_names();

// Reads a file. `limit`: the first examples only. Throws Error naming file, line and field; the
// content of no field is trusted.
EvaluationTask read_evaluation_task(const std::string& name, const std::string& file,
                                    std::optional<int64_t> limit = {});

// Puts the first `count` examples of `shots`, with their answers, before every context.
// Throws Error when there are fewer, or the task has no choices.
void add_few_shot_examples(EvaluationTask& task, const EvaluationTask& shots, int64_t count);

struct EvaluationOptions {
  int64_t max_length = 0;  // tokens of one input; longer contexts lose their beginning
  std::optional<int64_t>
      stride;  // perplexity: tokens that each window after the first adds; none: max_length
  std::optional<int32_t> prefix;       // stands before documents and in place of empty contexts
  bool add_prefix_to_context = false;  // before every context, too
};

// The texts of an example as ids. `first` counts requests: a document has one per window, choices
// one each.
struct EvaluationRequests {
  std::vector<std::vector<int32_t>> texts;  // what the requests point into
  std::vector<ScoreRequest> requests;
  std::vector<size_t> first;    // of each example, and the end
  std::vector<int64_t> tokens;  // of each example: those that are scored
  int64_t num_truncated = 0;    // inputs that lost their beginning

  EvaluationRequests() = default;
  EvaluationRequests(EvaluationRequests&&) = default;
  EvaluationRequests& operator=(EvaluationRequests&&) = default;
};
EvaluationRequests make_requests(const EvaluationTask& task, const Tokenizer& tokenizer,
                                 const EvaluationOptions& options);

struct EvaluationMetric {
  std::string name;
  double value = 0.0;
  std::optional<double>
      standard_error;  // of a mean over examples; none where there is no simple law
};

struct EvaluationResult {
  int64_t examples = 0;
  std::vector<EvaluationMetric> metrics;
  // Accuracy by group, in the order of the names; empty with fewer than two groups.
  struct Group {
    std::string name;
    int64_t examples = 0;
    double accuracy = 0.0;
  };
  std::vector<Group> groups;
};

// perplexity: token_perplexity, word_perplexity, byte_perplexity, bits_per_byte.
// lambada: acc, perplexity (of the last word). Choices: acc; acc_norm: the largest log-likelihood
// per character, acc_bytes: per byte.
EvaluationResult evaluate(const EvaluationTask& task, const EvaluationRequests& requests,
                          std::span<const Score> scores);

// The index that the log-likelihoods of an example choose; the first of equals.
size_t most_likely_choice(std::span<const Score> scores);

}  // namespace megatron
