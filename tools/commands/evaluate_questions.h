// Tasks of `megatron evaluate` whose questions may have images or sounds
// (evaluation/question_tasks.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/inference/evaluation/question_tasks.h"
#include "megatron/inference/evaluation/scoring.h"
#include "megatron/interop/load_model.h"

namespace megatron {

struct QuestionConfig : Config {
  std::string media_root;
  std::string media_model, audio_media_model;
  std::string question_format;
  std::string chat_template;
  bool plain_prompts = false;
  bool escape_modality_text = false;
  int64_t answer_tokens = 32;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  std::string format() const { return question_format.empty() ? "{question}" : question_format; }
};

struct AskedQuestions {
  EvaluationResult result;
  std::vector<std::string> samples;  // of each question a line of --log-samples
};

// Asks each question by the model's chat template, or as plain text; answers are written greedily,
// and choices scored. Communication: choices as score(); answers are written by one rank alone.
// Throws Error that names the question.
AskedQuestions ask_questions(const QuestionConfig& config, LoadedModel& model,
                             const ParallelGroups& groups, const QuestionTask& task,
                             int64_t batch_tokens, const ScoringProgress& progress);

}  // namespace megatron
