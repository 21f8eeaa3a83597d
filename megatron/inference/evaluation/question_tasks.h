// Questions about images and sounds, and their answers: data files of public benchmarks to rows
// with media.
//
// A row is a JSON object, in a list or on a line of its own:
//   image, images, audio, audios
//                      paths below a folder, data: addresses, or objects with bytes or path
//   question | query   a text; or messages that end with one of the user (multimodal_row.h)
//   answers | answer | label
//                      what counts as right: a text, a list of texts, or of objects with "answer"
//   choices            task choices: a list of texts, of which answer (or label) is a number from
//                      0, a letter from A, or one of the texts
//
//   vqa       the answer that people gave, as VQA counts it      vqa_acc
//   anls      edits away from the text of a document             anls
//   relaxed   numbers within 5%, else equal texts                relaxed_acc
//   exact     equal texts                                        exact_match
//   choices   the most likely of given answers                   acc, acc_norm, acc_bytes
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/datasets/multimodal/multimodal_source.h"
#include "megatron/inference/evaluation/evaluation_tasks.h"

namespace megatron {

struct Question {
  SourceSample sample;  // of a text alone: a row with media and without messages
  std::string text;     // empty: the row has messages
  std::vector<std::string> answers, choices;
  size_t gold = 0;
};

struct QuestionTask {
  std::string name;
  std::string file;
  std::vector<Question> questions;

  bool has_choices() const { return name == "choices"; }
};

bool is_question_task(std::string_view name);
std::string question_task_names();

// Reads a file; media that are files exist. `limit`: the first questions only. Throws Error naming
// row and field.
QuestionTask read_question_task(const std::string& name, const std::string& file,
                                const std::string& media_root, std::optional<int64_t> limit = {});

// The text that is asked: `format`, in which {question} stands for the question and {choices} for
// the choices, a line each behind a letter.
std::string question_text(const Question& question, std::string_view format);

// Whether letters are scored, since the format lists the choices.
bool lists_choices(std::string_view format);
// What is scored of the choices: letters, or the texts.
std::vector<std::string> scored_choices(const Question& question, std::string_view format);

// From 0 to 1, of a task without choices.
double answer_score(const QuestionTask& task, const Question& question, std::string_view answer);

// The metric of written answers: the mean of their scores.
EvaluationResult evaluate_answers(const QuestionTask& task, std::span<const double> scores);

// The task as evaluate() takes it, with the choices that are scored. Its examples have no context.
EvaluationTask task_of_choices(const QuestionTask& task, std::string_view format);

}  // namespace megatron
