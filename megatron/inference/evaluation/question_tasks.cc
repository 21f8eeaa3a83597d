#include "megatron/inference/evaluation/question_tasks.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/inference/evaluation/answer_scores.h"

namespace megatron {
namespace {

using nlohmann::json;

constexpr std::string_view kChoices = "choices";
constexpr std::string_view kPlaceOfQuestion = "{question}", kPlaceOfChoices = "{choices}";
constexpr size_t kMostChoices = 26;

struct Metric {
  std::string_view task, metric;
  double (*score)(std::string_view answer, std::span<const std::string> right);
};
constexpr Metric kMetrics[] = {{"vqa", "vqa_acc", vqa_score},
                               {"anls", "anls", anls_score},
                               {"relaxed", "relaxed_acc", relaxed_score},
                               {"exact", "exact_match", exact_score},
                               {kChoices, "acc", nullptr}};

const Metric& metric_of(std::string_view task) {
  const auto* const found = std::ranges::find(kMetrics, task, &Metric::task);
  MEGATRON_ASSERT(found != std::end(kMetrics), task);
  return *found;
}

// The first of the keys that the row has.
const json& field_of(const json& row, std::initializer_list<const char*> keys,
                     const std::string& where) {
  std::string names;
  for (const char* key : keys) {
    if (row.contains(key) && !row[key].is_null()) return row[key];
    names += cat(names.empty() ? "\"" : " or \"", key, "\"");
  }
  throw_error(cat(where, ": no field ", names));
}

// A text, or a number as it is written.
std::optional<std::string> text_of(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number()) return value.dump();
  if (value.is_object() && value.contains("answer")) return text_of(value["answer"]);
  return {};
}

std::vector<std::string> answers_of(const json& row, const std::string& where) {
  const json& given = field_of(row, {"answers", "answer", "label"}, where);
  std::vector<std::string> out;
  for (const json& one : given.is_array() ? given : json::array({given})) {
    const std::optional<std::string> text = text_of(one);
    MEGATRON_CHECK(text, where, ": an answer is ", one.dump(),
                   "; expected a text, or an object with \"answer\"");
    out.push_back(*text);
  }
  MEGATRON_CHECK(!out.empty(), where, ": has no answers\nhint: questions without cannot be scored");
  return out;
}

std::vector<std::string> choices_of(const json& row, const std::string& where) {
  const json& given = field_of(row, {"choices"}, where);
  std::vector<std::string> out;
  for (const json& one : given.is_array() ? given : json::array()) {
    MEGATRON_CHECK(one.is_string() && one != "", where, ": a choice is ", one.dump(),
                   ", no text that could be scored");
    out.push_back(one);
  }
  MEGATRON_CHECK(out.size() >= 2 && out.size() <= kMostChoices, where, ": has ", out.size(),
                 " choices; expected a list of 2 to ", kMostChoices, " texts");
  return out;
}

// A number from 0, a letter from A, or one of the texts.
size_t gold_of(const json& row, const std::vector<std::string>& choices, const std::string& where) {
  const json& given = field_of(row, {"answer", "label"}, where);
  int64_t out = -1;
  if (given.is_number_integer()) {
    out = given.get<int64_t>();
  } else if (given.is_string()) {
    const std::string text = given.get<std::string>();
    const auto found = std::ranges::find(choices, text);
    if (found != choices.end())
      out = found - choices.begin();
    else if (text.size() == 1 && text[0] >= 'A' && text[0] <= 'Z')
      out = text[0] - 'A';
  }
  MEGATRON_CHECK(out >= 0 && out < std::ssize(choices), where, ": the answer is ", given.dump(),
                 ", which names none of ", choices.size(), " choices");
  return static_cast<size_t>(out);
}

// The row's messages end with one of the user.
SourceSample sample_of(const SourceRow& source, const json& row,
                       const std::filesystem::path& media_root) {
  if (row.contains("messages") || row.contains("conversations")) {
    SourceSample sample = read_sample(source, media_root);
    MEGATRON_CHECK(!sample.row.messages.empty() && !sample.row.messages.back().is_assistant,
                   source.name, ": the last message is the assistant's\nhint: leave it out; what ",
                   "counts as right is in \"answers\"");
    return sample;
  }
  SourceSample sample{source.name, {}, {}};
  sample.row.media = parse_row_media(source.json, source.name);
  for (const RowMedium& medium : sample.row.media)
    sample.places.push_back(medium.path.empty() ? FileRange()
                                                : file_below(media_root, medium.path, source.name));
  return sample;
}

Question read_question(std::string_view task, const SourceRow& source,
                       const std::filesystem::path& media_root) {
  const json row = json::parse(source.json, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(row.is_object(), source.name, ": expected a JSON object");
  Question out;
  out.sample = sample_of(source, row, media_root);
  if (out.sample.row.messages.empty()) {
    const json& question = field_of(row, {"question", "query"}, source.name);
    MEGATRON_CHECK(question.is_string() && question != "", source.name, ": the question is ",
                   question.dump(), ", no text");
    out.text = question;
  }
  if (task != kChoices) {
    out.answers = answers_of(row, source.name);
    return out;
  }
  out.choices = choices_of(row, source.name);
  out.gold = gold_of(row, out.choices, source.name);
  return out;
}

}  // namespace

bool is_question_task(std::string_view name) {
  return std::ranges::find(kMetrics, name, &Metric::task) != std::end(kMetrics);
}

std::string question_task_names() { return listed(kMetrics, &Metric::task); }

QuestionTask read_question_task(const std::string& name, const std::string& file,
                                const std::string& media_root, std::optional<int64_t> limit) {
  QuestionTask task{name, file, {}};
  const std::filesystem::path root = media_root_of(media_root, file);
  read_source_file(SourceKind::kJson, file, [&](const SourceRow& row) {
    if (!limit || std::ssize(task.questions) < *limit)
      task.questions.push_back(read_question(name, row, root));
  });
  MEGATRON_CHECK(!task.questions.empty(), file, ": holds no questions");
  return task;
}

bool lists_choices(std::string_view format) {
  return format.find(kPlaceOfChoices) != std::string_view::npos;
}

std::vector<std::string> scored_choices(const Question& question, std::string_view format) {
  if (!lists_choices(format)) return question.choices;
  std::vector<std::string> letters;
  for (size_t i = 0; i < question.choices.size(); ++i)
    letters.emplace_back(1, static_cast<char>('A' + static_cast<int>(i)));
  return letters;
}

std::string question_text(const Question& question, std::string_view format) {
  std::string choices, out;
  for (size_t i = 0; i < question.choices.size(); ++i)
    choices += cat(i > 0 ? "\n" : "", static_cast<char>('A' + static_cast<int>(i)), ". ",
                   question.choices[i]);
  while (!format.empty()) {
    const size_t next = format.find('{');
    out += format.substr(0, next);
    format.remove_prefix(std::min(next, format.size()));
    if (format.starts_with(kPlaceOfQuestion)) {
      out += question.text;
      format.remove_prefix(kPlaceOfQuestion.size());
    } else if (format.starts_with(kPlaceOfChoices)) {
      out += choices;
      format.remove_prefix(kPlaceOfChoices.size());
    } else if (!format.empty()) {
      out += '{';
      format.remove_prefix(1);
    }
  }
  return out;
}

double answer_score(const QuestionTask& task, const Question& question, std::string_view answer) {
  return metric_of(task.name).score(answer, question.answers);
}

EvaluationResult evaluate_answers(const QuestionTask& task, std::span<const double> scores) {
  const auto count = static_cast<double>(scores.size());
  double mean = 0, squares = 0;
  for (const double score : scores) mean += score / count;
  for (const double score : scores) squares += (score - mean) * (score - mean);
  EvaluationResult out;
  out.examples = std::ssize(scores);
  out.metrics = {{std::string(metric_of(task.name).metric), mean, {}}};
  if (scores.size() > 1) out.metrics[0].standard_error = std::sqrt(squares / (count - 1) / count);
  return out;
}

EvaluationTask task_of_choices(const QuestionTask& task, std::string_view format) {
  EvaluationTask out{task.name, EvaluationKind::kChoices, !lists_choices(format), task.file, {}};
  for (const Question& question : task.questions) {
    EvaluationExample example;
    example.where = question.sample.name;
    example.choices = scored_choices(question, format);
    example.gold = question.gold;
    out.examples.push_back(std::move(example));
  }
  return out;
}

}  // namespace megatron
