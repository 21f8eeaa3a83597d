// Evaluation tasks of `megatron evaluate`: data files of public benchmarks to texts to score, and
// scores to metrics.
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
#include <vector>

#include "megatron/inference/evaluation/scoring.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

enum class EvaluationKind { kPerplexity, kLastWord, kChoices };

// One example: a context and its possible continuations.
struct EvaluationExample {
  std::string where;                 // "file:12"
  std::string description;           // precedes few-shot examples and the context
  std::string context;               // empty: a document of kPerplexity
  std::vector<std::string> choices;  // continuations; separated from the context by `delimiter`
  std::string delimiter = " ";
  size_t gold = 0;
  std::string group;  // subject of MMLU
  int64_t words = 0;  // kPerplexity: words of the document, split at white space
};

struct EvaluationTask {
  std::string name;
  EvaluationKind kind = EvaluationKind::kChoices;
  bool normalized = false;  // choices differ in length, so that acc_norm and acc_bytes are reported
  std::string file;
  std::vector<EvaluationExample> examples;
};

// "perplexity, lambada, ..."
std::string evaluation_task_names();

// Reads a file. `limit`: the first examples only. Throws Error naming file, line and field; every
// field is validated.
EvaluationTask read_evaluation_task(const std::string& name, const std::string& file,
                                    std::optional<int64_t> limit = {});

// Prepends the first `count` examples of `shots`, with their answers, to every context. Throws
// Error if there are fewer, or the task has no choices.
void add_few_shot_examples(EvaluationTask& task, const EvaluationTask& shots, int64_t count);

struct EvaluationOptions {
  int64_t max_length = 0;  // tokens of one input; longer contexts are truncated at the beginning
  // Perplexity: new tokens per window after the first; none: max_length
  std::optional<int64_t> stride;
  std::optional<int32_t> prefix;       // prepended to documents; replaces empty contexts
  bool add_prefix_to_context = false;  // prepended to every context, too
};

// The examples as token ids. `first` indexes requests: a document has one per window, choices one
// each.
struct EvaluationRequests {
  std::vector<std::vector<int32_t>> texts;  // memory that the requests point into
  std::vector<ScoreRequest> requests;
  std::vector<size_t> first;    // first request of each example, and the end
  std::vector<int64_t> tokens;  // scored tokens of each example
  int64_t num_truncated = 0;    // truncated inputs

  EvaluationRequests() = default;
  EvaluationRequests(EvaluationRequests&&) = default;
  EvaluationRequests& operator=(EvaluationRequests&&) = default;
};
EvaluationRequests make_requests(const EvaluationTask& task, const Tokenizer& tokenizer,
                                 const EvaluationOptions& options);

struct EvaluationMetric {
  std::string name;
  double value = 0.0;
  // Standard error of a mean over examples; none: not computed
  std::optional<double> standard_error;
};

struct EvaluationResult {
  int64_t examples = 0;
  std::vector<EvaluationMetric> metrics;
  // Accuracy by group, sorted by name; empty with fewer than two groups.
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

// Index of the choice with the highest log-likelihood; the first of equals.
size_t most_likely_choice(std::span<const Score> scores);

}  // namespace megatron
