// Questions with several choices, of which one answers: what multiple-choice heads are trained on.
//
// Files: JSON lines, or one object a file, as RACE has it: {"article", "questions", "options",
// "answers"}. options[i] are the choices of questions[i], answers[i] is the letter of the right
// one, A for the first; without "answers" it is a file to predict. Each choice becomes a pair of
// texts, as in Megatron-LM: the question, in which the choice stands in the place of "_" or behind
// which it follows, and the article.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/tuning/labelled_texts.h"

namespace megatron {

// Tokens of a question with its choice; the rest of it is cut.
constexpr int64_t kMostQuestionTokens = 128;

struct ChoiceQuestion {
  std::vector<std::string> texts;  // the question with each choice
  std::string article;
  std::optional<int64_t> answer;  // from 0
};

// Throws Error naming file and line: a line that is no such object, a question with another number
// of choices, an answer that is no letter of one.
std::vector<ChoiceQuestion> read_choice_questions(const std::string& path, int64_t choices);

// One for each choice; the label is that of the question, which is the right choice.
std::vector<LabelledText> texts_of_choices(const std::vector<ChoiceQuestion>& questions);

// As mock_labelled(): `count` rows, of which each `choices` are of one question and have its answer
// as their label.
std::vector<LabelledTokens> mock_choices(const DatasetRequest& request, Split split, int64_t count,
                                         int64_t choices);

}  // namespace megatron
