#include "megatron/inference/evaluation/evaluation_tasks.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/utf8.h"
#include "megatron/chat/python_text.h"

namespace megatron {
namespace {

using nlohmann::json;

// len(re.split(r"\s+", text))
int64_t count_words(std::string_view text) {
  int64_t count = 1;
  bool in_space = false;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character c = decode_utf8(text, at);
    const bool space = c.valid && python_is_space(c.code);
    if (space && !in_space) ++count;
    in_space = space;
    at += static_cast<size_t>(c.bytes);
  }
  return count;
}

// re.sub(r"\[.*?\]", "", text)
std::string without_brackets(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '[') {
      const size_t end = text.find_first_of("]\n", at + 1);
      if (end != std::string_view::npos && text[end] == ']') {
        at = end + 1;
        continue;
      }
    }
    out += text[at++];
  }
  return out;
}

// -- fields of one line

class Line {
 public:
  Line(std::string_view text, std::string where) : where_(std::move(where)) {
    value_ = json::parse(text, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(value_.is_object(), where_, ": expected a JSON object");
  }
  Line(json value, std::string where) : value_(std::move(value)), where_(std::move(where)) {
    MEGATRON_CHECK(value_.is_object(), where_, ": expected a JSON object");
  }

  const std::string& where() const { return where_; }
  bool has(const char* key) const { return value_.contains(key); }
  const json& at(const char* key) const {
    MEGATRON_CHECK(has(key), where_, ": no field \"", key, "\"");
    return value_[key];
  }
  std::string text(const char* key) const {
    MEGATRON_CHECK(at(key).is_string(), where_, ": \"", key, "\" is no string");
    return value_[key].get<std::string>();
  }
  std::vector<std::string> texts(const char* key) const {
    const json& list = at(key);
    bool fits = list.is_array() && !list.empty();
    for (const json& item : list) fits = fits && item.is_string();
    MEGATRON_CHECK(fits, where_, ": \"", key, "\" is no list of strings");
    return list.get<std::vector<std::string>>();
  }
  Line object(const char* key) const { return {at(key), cat(where_, ": \"", key, "\"")}; }

  // The index given by a label: a number, its decimal text, or a letter from A.
  size_t index(const char* key, size_t count) const { return index(at(key), key, count); }
  size_t index(const json& label, const char* key, size_t count) const {
    int64_t i = -1;
    if (label.is_number_integer()) {
      i = label.get<int64_t>();
    } else if (label.is_string()) {
      const std::string text = label.get<std::string>();
      const bool digits = !text.empty() && text.size() < 4 &&
                          text.find_first_not_of("0123456789") == std::string::npos;
      if (digits) i = std::stoll(text);
      if (text.size() == 1 && text[0] >= 'A' && text[0] <= 'Z') i = text[0] - 'A';
    }
    MEGATRON_CHECK(i >= 0 && static_cast<uint64_t>(i) < count, where_, ": \"", key, "\" is ",
                   label.dump(), ", which names none of ", count, " choices",
                   label == "" ? "\nhint: files without answers cannot be scored" : "");
    return static_cast<size_t>(i);
  }

 private:
  json value_;
  std::string where_;
};

// -- the formats

EvaluationExample read_document(const Line& line) {
  EvaluationExample example;
  example.choices = {line.text(line.has("text") || !line.has("page") ? "text" : "page")};
  return example;
}

EvaluationExample read_lambada(const Line& line) {
  const std::string text = line.text("text");
  const size_t space = text.rfind(' ');
  MEGATRON_CHECK(space != std::string::npos && space > 0 && space + 1 < text.size(), line.where(),
                 ": \"text\" has no last word after a space");
  EvaluationExample example;
  example.context = text.substr(0, space);
  example.choices = {text.substr(space + 1)};
  return example;
}

EvaluationExample read_hellaswag(const Line& line) {
  const auto clean = [](std::string_view text) {  // bracketed artifacts of WikiHow
    return replaced(without_brackets(replaced(python_stripped(text), " [title]", ". ")), "  ", " ");
  };
  EvaluationExample example;
  example.context = clean(line.text("activity_label") + ": " + line.text("ctx_a") + " " +
                          python_capitalized(line.text("ctx_b")));
  for (const std::string& ending : line.texts("endings")) example.choices.push_back(clean(ending));
  example.gold = line.index("label", example.choices.size());
  return example;
}

EvaluationExample read_arc(const Line& line) {
  EvaluationExample example;
  std::vector<std::string> labels;
  std::string question;
  if (line.at("question").is_object()) {  // as AI2 publishes it
    const Line inner = line.object("question");
    question = inner.text("stem");
    const json& choices = inner.at("choices");
    MEGATRON_CHECK(choices.is_array() && !choices.empty(), inner.where(),
                   ": \"choices\" is no list");
    for (const json& choice : choices) {
      const Line one(choice, inner.where() + ": \"choices\"");
      example.choices.push_back(one.text("text"));
      labels.push_back(one.text("label"));
    }
  } else {
    question = line.text("question");
    const Line choices = line.object("choices");
    example.choices = choices.texts("text");
    labels = choices.texts("label");
    MEGATRON_CHECK(labels.size() == example.choices.size(), choices.where(), ": ",
                   example.choices.size(), " texts, but ", labels.size(), " labels");
  }
  example.context = "Question: " + question + "\nAnswer:";
  const std::string key = line.text("answerKey");
  const auto found = std::find(labels.begin(), labels.end(), key);
  MEGATRON_CHECK(found != labels.end(), line.where(), ": \"answerKey\" is \"", key,
                 "\", which is none of the labels");
  example.gold = static_cast<size_t>(found - labels.begin());
  return example;
}

EvaluationExample read_piqa(const Line& line) {
  EvaluationExample example;
  example.context = "Question: " + line.text("goal") + "\nAnswer:";
  example.choices = {line.text("sol1"), line.text("sol2")};
  example.gold = line.index("label", 2);
  return example;
}

EvaluationExample read_mmlu(const Line& line) {
  EvaluationExample example;
  const std::vector<std::string> choices = line.texts("choices");
  MEGATRON_CHECK(choices.size() == 4, line.where(), ": \"choices\" has ", choices.size(),
                 " entries, expected 4");
  example.context = python_stripped(line.text("question"));
  for (size_t i = 0; i < 4; ++i) {
    example.choices.emplace_back(1, static_cast<char>('A' + i));
    example.context += "\n" + example.choices[i] + ". " + choices[i];
  }
  example.context += "\nAnswer:";
  example.gold = line.index("answer", 4);
  if (line.has("subject")) {
    example.group = line.text("subject");
    example.description = "The following are multiple choice questions (with answers) about " +
                          replaced(example.group, "_", " ") + ".\n\n";
  }
  return example;
}

// The last question is scored; earlier ones are part of the context, with their answers.
EvaluationExample read_race(const Line& line) {
  struct Problem {
    std::string question;
    std::vector<std::string> options;
    size_t answer = 0;
  };
  std::vector<Problem> problems;
  const auto add = [&](const Line& one) {
    Problem problem{one.text("question"), one.texts("options"), 0};
    problem.answer = one.index("answer", problem.options.size());
    problems.push_back(std::move(problem));
  };
  if (line.has("problems")) {
    const json& list = line.at("problems");
    MEGATRON_CHECK(list.is_array() && !list.empty(), line.where(),
                   ": \"problems\" is no list of objects");
    for (const json& one : list) add(Line(one, line.where() + ": \"problems\""));
  } else if (line.has("questions")) {
    const std::vector<std::string> questions = line.texts("questions");
    const json &options = line.at("options"), &answers = line.at("answers");
    MEGATRON_CHECK(options.is_array() && answers.is_array() && options.size() == questions.size() &&
                       answers.size() == questions.size(),
                   line.where(), ": \"questions\", \"options\" and \"answers\" differ in length");
    for (size_t i = 0; i < questions.size(); ++i)
      add(Line({{"question", questions[i]}, {"options", options[i]}, {"answer", answers[i]}},
               line.where()));
  } else {
    add(line);
  }
  EvaluationExample example;
  example.context = "Article: " + line.text("article") + "\n\n";
  for (size_t i = 0; i + 1 < problems.size(); ++i) {
    const Problem& problem = problems[i];
    const std::string& answer = problem.options[problem.answer];
    if (problem.question.ends_with("  _  ."))
      example.context += problem.question.substr(0, problem.question.size() - 5) + answer + "\n";
    else
      example.context += "Question: " + problem.question + "\nAnswer: " + answer + "\n";
  }
  example.context += problems.back().question;
  example.choices = problems.back().options;
  example.gold = problems.back().answer;
  return example;
}

struct Format {
  std::string_view name;
  EvaluationKind kind;
  bool normalized;
  EvaluationExample (*read)(const Line& line);
};

constexpr Format kFormats[] = {{"perplexity", EvaluationKind::kPerplexity, false, read_document},
                               {"lambada", EvaluationKind::kLastWord, false, read_lambada},
                               {"hellaswag", EvaluationKind::kChoices, true, read_hellaswag},
                               {"arc", EvaluationKind::kChoices, true, read_arc},
                               {"piqa", EvaluationKind::kChoices, true, read_piqa},
                               {"mmlu", EvaluationKind::kChoices, false, read_mmlu},
                               {"race", EvaluationKind::kChoices, true, read_race}};

const Format& find_format(const std::string& name) {
  for (const Format& format : kFormats)
    if (format.name == name) return format;
  throw_error(cat("unknown task ", name, "\nhint: the tasks are ", evaluation_task_names()));
}

struct Encoded {
  std::vector<int32_t> ids;
  size_t context = 0;  // number of context ids among them
};

// The whole text is encoded at once; scored are its ids after the first n, with n = number of ids
// of the context alone. Trailing white space of the context moves to the continuation, because
// tokens usually begin with it.
Encoded encode_pair(const Tokenizer& tokenizer, std::string context, std::string continuation,
                    const EvaluationOptions& options, const std::string& where) {
  Encoded out;
  if (context.empty()) {
    MEGATRON_CHECK(options.prefix, where,
                   ": the context is empty and the tokenizer has no token to begin with",
                   "\nhint: name one with --prefix-token-id");
    out.ids = {*options.prefix};
    out.context = 1;
    tokenizer.encode_append(continuation, out.ids);
    return out;
  }
  const size_t end = python_stripped(context, nullptr, /*left=*/false).size();
  continuation = context.substr(end) + continuation;
  context.resize(end);
  if (options.add_prefix_to_context || context.empty()) {
    MEGATRON_CHECK(options.prefix, where, ": the tokenizer has no token to begin with",
                   "\nhint: name one with --prefix-token-id");
    out.ids.push_back(*options.prefix);
  }
  const size_t before = out.ids.size();
  tokenizer.encode_append(context + continuation, out.ids);
  out.context = std::min(before + tokenizer.encode(context).size(), out.ids.size());
  MEGATRON_CHECK(out.ids.size() > out.context, where, ": the text \"", continuation,
                 "\" has no tokens of its own after the context");
  return out;
}

// Windows of a document: each scores the next ids, with as much context before them as fits.
void add_windows(std::span<const int32_t> ids, const EvaluationOptions& options,
                 std::vector<ScoreRequest>& out) {
  const auto length = static_cast<size_t>(options.max_length);
  const auto stride = static_cast<size_t>(options.stride.value_or(options.max_length));
  size_t done = 1;  // scored ids, and the first one, which is context
  bool first = true;
  while (done < ids.size()) {
    const size_t reach = first ? length + 1 - done : stride;
    const size_t end = std::min(ids.size(), done + reach),
                 begin = end > length + 1 ? end - length - 1 : 0;
    out.push_back({ids.subspan(begin, end - begin), static_cast<int64_t>(end - done)});
    done = end;
    first = false;
  }
}

void add_document(const EvaluationExample& example, const Tokenizer& tokenizer,
                  const EvaluationOptions& options, EvaluationRequests& out) {
  std::vector<int32_t> ids;
  if (options.prefix) ids.push_back(*options.prefix);
  tokenizer.encode_append(example.choices[0], ids);
  MEGATRON_CHECK(ids.size() >= 2, example.where,
                 ": the document has no tokens that could be predicted");
  out.tokens.push_back(static_cast<int64_t>(ids.size()) - 1);
  out.texts.push_back(std::move(ids));
  add_windows(out.texts.back(), options, out.requests);
}

void add_choices(const EvaluationExample& example, const Tokenizer& tokenizer,
                 const EvaluationOptions& options, EvaluationRequests& out) {
  int64_t tokens = 0;
  for (const std::string& choice : example.choices) {
    Encoded encoded = encode_pair(tokenizer, example.description + example.context,
                                  example.delimiter + choice, options, example.where);
    const auto most = static_cast<size_t>(options.max_length) + 1;
    const size_t scored = encoded.ids.size() - encoded.context;
    MEGATRON_CHECK(scored < most, example.where, ": a choice has ", scored,
                   " tokens, --max-length is ", options.max_length);
    if (encoded.ids.size() > most) {
      encoded.ids.erase(encoded.ids.begin(), encoded.ids.end() - static_cast<std::ptrdiff_t>(most));
      ++out.num_truncated;
    }
    out.texts.push_back(std::move(encoded.ids));
    out.requests.push_back({out.texts.back(), static_cast<int64_t>(scored)});
    tokens += static_cast<int64_t>(scored);
  }
  out.tokens.push_back(tokens);
}

// Mean and standard error of `count` zeros and ones with sum `right`.
EvaluationMetric accuracy(std::string name, int64_t right, int64_t count) {
  const double n = static_cast<double>(count), p = static_cast<double>(right) / n;
  EvaluationMetric metric{std::move(name), p, {}};
  if (count > 1) metric.standard_error = std::sqrt(p * (1 - p) / (n - 1));
  return metric;
}

template <class Weight>
size_t best_choice(std::span<const Score> scores, const Weight& weight) {
  size_t best = 0;
  for (size_t i = 1; i < scores.size(); ++i)
    if (scores[i].logprob / weight(i) > scores[best].logprob / weight(best)) best = i;
  return best;
}

EvaluationResult evaluate_documents(const EvaluationTask& task, const EvaluationRequests& requests,
                                    std::span<const Score> scores) {
  double logprob = 0.0, tokens = 0.0, words = 0.0, bytes = 0.0;
  for (const Score& score : scores) logprob += score.logprob;
  for (size_t i = 0; i < task.examples.size(); ++i) {
    tokens += static_cast<double>(requests.tokens[i]);
    words += static_cast<double>(task.examples[i].words);
    bytes += static_cast<double>(task.examples[i].choices[0].size());
  }
  EvaluationResult result;
  result.metrics = {{"token_perplexity", std::exp(-logprob / tokens), {}},
                    {"word_perplexity", std::exp(-logprob / words), {}},
                    {"byte_perplexity", std::exp(-logprob / bytes), {}},
                    {"bits_per_byte", -logprob / bytes / std::numbers::ln2, {}}};
  return result;
}

EvaluationResult evaluate_last_words(std::span<const Score> scores) {
  double logprob = 0.0;
  int64_t right = 0;
  for (const Score& score : scores) {
    logprob += score.logprob;
    right += score.greedy ? 1 : 0;
  }
  const auto count = static_cast<int64_t>(scores.size());
  EvaluationResult result;
  result.metrics = {accuracy("acc", right, count),
                    {"perplexity", std::exp(-logprob / static_cast<double>(count)), {}}};
  return result;
}

EvaluationResult evaluate_choices(const EvaluationTask& task, const EvaluationRequests& requests,
                                  std::span<const Score> scores) {
  int64_t right = 0, right_characters = 0, right_bytes = 0;
  std::map<std::string, std::pair<int64_t, int64_t>> groups;  // examples, right
  for (size_t i = 0; i < task.examples.size(); ++i) {
    const EvaluationExample& example = task.examples[i];
    const auto own = scores.subspan(requests.first[i], requests.first[i + 1] - requests.first[i]);
    const bool hit = most_likely_choice(own) == example.gold;
    right += hit ? 1 : 0;
    right_characters += best_choice(own,
                                    [&](size_t c) {
                                      return static_cast<double>(python_length(example.choices[c]));
                                    }) == example.gold
                            ? 1
                            : 0;
    right_bytes += best_choice(own,
                               [&](size_t c) {
                                 return static_cast<double>(example.choices[c].size());
                               }) == example.gold
                       ? 1
                       : 0;
    auto& [count, hits] = groups[example.group];
    ++count;
    hits += hit ? 1 : 0;
  }
  const auto count = static_cast<int64_t>(task.examples.size());
  EvaluationResult result;
  result.metrics = {accuracy("acc", right, count)};
  if (task.normalized) {
    result.metrics.push_back(accuracy("acc_norm", right_characters, count));
    result.metrics.push_back(accuracy("acc_bytes", right_bytes, count));
  }
  if (groups.size() > 1)
    for (const auto& [name, numbers] : groups)
      result.groups.push_back(
          {name, numbers.first,
           static_cast<double>(numbers.second) / static_cast<double>(numbers.first)});
  return result;
}

}  // namespace

std::string evaluation_task_names() { return listed(kFormats, &Format::name); }

EvaluationTask read_evaluation_task(const std::string& name, const std::string& file,
                                    std::optional<int64_t> limit) {
  const Format& format = find_format(name);
  EvaluationTask task{name, format.kind, format.normalized, file, {}};
  const std::string text = read_file(file);
  const auto add = [&](EvaluationExample example, std::string where) {
    example.where = std::move(where);
    if (task.kind == EvaluationKind::kPerplexity) {
      example.words = count_words(example.choices[0]);
      example.delimiter.clear();
    }
    for (const std::string& choice : example.choices)
      MEGATRON_CHECK(!choice.empty(), example.where, ": a text to score is empty");
    task.examples.push_back(std::move(example));
  };
  if (task.kind == EvaluationKind::kPerplexity && !file.ends_with(".jsonl") &&
      !file.ends_with(".json")) {
    MEGATRON_CHECK(!text.empty(), file, ": is empty");
    EvaluationExample document;
    document.choices = {text};
    add(std::move(document), file);
    return task;
  }
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    if (limit && static_cast<int64_t>(task.examples.size()) >= *limit) break;
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line(text.data() + begin, end - begin);
    ++number;
    const std::string where = cat(file, ":", number);
    if (line.find_first_not_of(" \t\r") != std::string_view::npos)
      add(format.read(Line(line, where)), where);
    begin = end + 1;
  }
  MEGATRON_CHECK(!task.examples.empty(), file, ": holds no examples");
  return task;
}

void add_few_shot_examples(EvaluationTask& task, const EvaluationTask& shots, int64_t count) {
  MEGATRON_CHECK(task.kind == EvaluationKind::kChoices, "--num-fewshot has no effect on ",
                 task.name, ", which has no choices");
  // With subjects in the file of few-shot examples, each subject uses its own.
  std::map<std::string, std::string> prefixes;
  for (EvaluationExample& example : task.examples) {
    auto [found, inserted] = prefixes.try_emplace(example.group);
    if (inserted) {
      int64_t used = 0;
      for (const EvaluationExample& shot : shots.examples) {
        if (used == count) break;
        if (shot.group != example.group) continue;
        found->second += shot.context + shot.delimiter + shot.choices[shot.gold] + "\n\n";
        ++used;
      }
      MEGATRON_CHECK(used == count, shots.file, ": holds ", used, " examples",
                     example.group.empty() ? "" : " of the subject ", example.group,
                     ", --num-fewshot is ", count);
    }
    example.context = found->second + example.context;
  }
}

EvaluationRequests make_requests(const EvaluationTask& task, const Tokenizer& tokenizer,
                                 const EvaluationOptions& options) {
  MEGATRON_CHECK(options.max_length > 0, "--max-length ", options.max_length, " must be positive");
  MEGATRON_CHECK(!options.stride || (*options.stride > 0 && *options.stride <= options.max_length),
                 "--stride ", options.stride.value_or(0), " is not between 1 and --max-length ",
                 options.max_length);
  EvaluationRequests out;
  for (const EvaluationExample& example : task.examples) {
    out.first.push_back(out.requests.size());
    if (task.kind == EvaluationKind::kPerplexity)
      add_document(example, tokenizer, options, out);
    else
      add_choices(example, tokenizer, options, out);
  }
  out.first.push_back(out.requests.size());
  return out;
}

EvaluationResult evaluate(const EvaluationTask& task, const EvaluationRequests& requests,
                          std::span<const Score> scores) {
  MEGATRON_ASSERT(scores.size() == requests.requests.size());
  EvaluationResult result;
  switch (task.kind) {
    case EvaluationKind::kPerplexity:
      result = evaluate_documents(task, requests, scores);
      break;
    case EvaluationKind::kLastWord:
      result = evaluate_last_words(scores);
      break;
    case EvaluationKind::kChoices:
      result = evaluate_choices(task, requests, scores);
      break;
  }
  result.examples = static_cast<int64_t>(task.examples.size());
  return result;
}

size_t most_likely_choice(std::span<const Score> scores) {
  return best_choice(scores, [](size_t) { return 1.0; });
}

}  // namespace megatron
