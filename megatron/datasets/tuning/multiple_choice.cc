#include "megatron/datasets/tuning/multiple_choice.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"

namespace megatron {
namespace {

using nlohmann::json;

class ChoiceReader {
 public:
  ChoiceReader(const std::string& path, int64_t choices) : path_(path), choices_(choices) {}

  std::vector<ChoiceQuestion> run() {
    for_each_line_of(read_file(path_), [&](std::string_view line, int64_t number) {
      number_ = number;
      if (line.find_first_not_of(" \t\r") != std::string_view::npos) add_article(line);
    });
    MEGATRON_CHECK(!questions_.empty(), path_, ": holds no questions");
    return std::move(questions_);
  }

 private:
  std::string where() const { return cat(path_, ":", number_); }

  // The strings of a list.
  std::vector<std::string> strings(const json& list, const std::string& name) const {
    std::vector<std::string> all;
    MEGATRON_CHECK(list.is_array(), where(), ": no list of strings under ", name);
    for (const json& text : list) {
      MEGATRON_CHECK(text.is_string(), where(), ": no list of strings under ", name);
      all.push_back(text);
    }
    return all;
  }

  const json& member(const json& object, const char* name) const {
    MEGATRON_CHECK(object.contains(name), where(), ": nothing under \"", name,
                   "\"\nhint: a line is an article of RACE, {\"article\", \"questions\", "
                   "\"options\", \"answers\"}");
    return object[name];
  }

  void add_article(std::string_view line) {
    const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(object.is_object(), where(), ": expected a JSON object");
    const json& article = member(object, "article");
    MEGATRON_CHECK(article.is_string(), where(), ": no string under \"article\"");
    const std::vector<std::string> asked = strings(member(object, "questions"), "\"questions\"");
    const json& options = member(object, "options");
    same_number(options, "options", asked.size());
    std::vector<std::string> answers;
    if (object.contains("answers")) {
      answers = strings(object["answers"], "\"answers\"");
      same_number(object["answers"], "answers", asked.size());
    }
    const std::string context = clean_text(article.get<std::string>());
    for (size_t i = 0; i < asked.size(); ++i) {
      ChoiceQuestion question;
      question.article = context;
      const std::string name = cat("\"options\" of question ", i + 1);
      const std::vector<std::string> choices = strings(options[i], name);
      MEGATRON_CHECK(std::ssize(choices) == choices_, where(), ": question ", i + 1, " has ",
                     choices.size(), " choices, --bert-choices is ", choices_);
      for (const std::string& choice : choices)
        question.texts.push_back(clean_text(asked[i].find('_') != std::string::npos
                                                ? replaced(asked[i], "_", choice)
                                                : cat(asked[i], " ", choice)));
      if (!answers.empty()) question.answer = answer_of(answers[i], i);
      questions_.push_back(std::move(question));
    }
  }

  void same_number(const json& list, const char* name, size_t questions) const {
    MEGATRON_CHECK(list.is_array() && list.size() == questions, where(), ": \"", name,
                   "\" is no list of as many as \"questions\", ", questions);
  }

  int64_t answer_of(const std::string& letter, size_t question) const {
    const int64_t answer = letter.size() == 1 ? letter[0] - 'A' : -1;
    MEGATRON_CHECK(answer >= 0 && answer < choices_, where(), ": answer \"", letter,
                   "\" of question ", question + 1, " is no letter of one of its ", choices_,
                   " choices, A for the first");
    return answer;
  }

  const std::string& path_;
  const int64_t choices_;
  std::vector<ChoiceQuestion> questions_;
  int64_t number_ = 0;
};

}  // namespace

std::vector<ChoiceQuestion> read_choice_questions(const std::string& path, int64_t choices) {
  return ChoiceReader(path, choices).run();
}

std::vector<LabelledText> texts_of_choices(const std::vector<ChoiceQuestion>& questions) {
  std::vector<LabelledText> texts;
  for (const ChoiceQuestion& question : questions)
    for (const std::string& text : question.texts) {
      LabelledText& row = texts.emplace_back();
      row.text = text;
      row.text_b = question.article;
      row.most_of_text = kMostQuestionTokens;
      if (question.answer) row.label = static_cast<double>(*question.answer);
    }
  return texts;
}

std::vector<LabelledTokens> mock_choices(const DatasetRequest& request, Split split, int64_t count,
                                         int64_t choices) {
  const int64_t questions = std::max<int64_t>(1, (count + choices - 1) / choices);
  std::vector<LabelledTokens> rows = mock_labelled(request, split, questions * choices, choices);
  // One question after the other asks for another choice.
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i].label = static_cast<float>(static_cast<int64_t>(i) / choices % choices);
  return rows;
}

}  // namespace megatron
