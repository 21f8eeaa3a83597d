#include "megatron/inference/evaluation/text_metrics.h"

#include <algorithm>
#include <map>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"
#include "megatron/chat/python_text.h"
#include "megatron/tokenizers/python_unicode.h"

namespace megatron {
namespace {

using Words = std::vector<std::string>;

double f1_of(double common, size_t written, size_t expected) {
  if (common == 0) return 0;
  const double precision = common / static_cast<double>(written),
               recall = common / static_cast<double>(expected);
  return 2 * precision * recall / (precision + recall);
}

// How many elements both have, each as often as the one that has it less often.
template <class T>
double common_elements(const std::vector<T>& a, const std::vector<T>& b) {
  std::map<T, int64_t> counts;
  for (const T& element : a) ++counts[element];
  double common = 0;
  for (const T& element : b)
    if (counts[element]-- > 0) ++common;
  return common;
}

std::string lower_case_of(std::string_view text) {
  std::string lower;
  append_python_lower(text, lower);
  return lower;
}

// -- SQuAD

bool is_class(const Utf8Character& c, PythonClass of) {
  return c.valid && (python_classes()[c.code] & of) != 0;
}

bool is_ascii_punctuation(uint32_t code) {
  return code > ' ' && code < 0x7f && !((code | 0x20) >= 'a' && (code | 0x20) <= 'z') &&
         !(code >= '0' && code <= '9');
}

// Without the articles, which are whole words of `\w`: they become a space.
std::string without_articles(std::string_view text) {
  std::string out, word;
  const auto end_word = [&] {
    out += word == "a" || word == "an" || word == "the" ? " " : word;
    word.clear();
  };
  for (size_t at = 0; at < text.size();) {
    const Utf8Character c = decode_utf8(text, at);
    const std::string_view bytes = text.substr(at, static_cast<size_t>(c.bytes));
    at += static_cast<size_t>(c.bytes);
    if (is_class(c, kPythonWord)) {
      word += bytes;
      continue;
    }
    end_word();
    out += bytes;
  }
  end_word();
  return out;
}

Words squad_words(std::string_view text) {
  std::string kept;
  const std::string lower = lower_case_of(text);
  for (const char c : lower)
    if (!is_ascii_punctuation(static_cast<unsigned char>(c))) kept += c;
  kept = without_articles(kept);
  Words words(1);
  for (size_t at = 0; at < kept.size();) {
    const Utf8Character c = decode_utf8(kept, at);
    if (!is_class(c, kPythonSpace))
      words.back() += kept.substr(at, static_cast<size_t>(c.bytes));
    else if (!words.back().empty())
      words.emplace_back();
    at += static_cast<size_t>(c.bytes);
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

double token_f1(std::string_view written, std::string_view expected) {
  const Words a = squad_words(written), b = squad_words(expected);
  if (a.empty() || b.empty()) return a.empty() && b.empty() ? 1 : 0;
  return f1_of(common_elements(a, b), a.size(), b.size());
}

// -- ROUGE

// Runs of a-z and 0-9 of the text in lower case.
Words rouge_words(std::string_view text) {
  Words words(1);
  const std::string lower = lower_case_of(text);
  for (const char c : lower) {
    if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'))
      words.back() += c;
    else if (!words.back().empty())
      words.emplace_back();
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

double rouge_pairs(const Words& written, const Words& expected) {
  const auto pairs = [](const Words& words) {
    std::vector<std::pair<std::string, std::string>> all;
    for (size_t i = 1; i < words.size(); ++i) all.emplace_back(words[i - 1], words[i]);
    return all;
  };
  const auto a = pairs(written), b = pairs(expected);
  return f1_of(common_elements(a, b), a.size(), b.size());
}

double rouge_subsequence(const Words& written, const Words& expected) {
  // Longest common subsequences of what precedes and each beginning of `expected`
  std::vector<int64_t> longest(expected.size() + 1, 0);
  for (const std::string& word : written) {
    int64_t diagonal = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t above = longest[i + 1];
      longest[i + 1] = word == expected[i] ? diagonal + 1 : std::max(above, longest[i]);
      diagonal = above;
    }
  }
  return f1_of(static_cast<double>(longest.back()), written.size(), expected.size());
}

}  // namespace

std::vector<NamedMetric> text_metrics(std::span<const std::string> written,
                                      std::span<const std::string> expected) {
  MEGATRON_CHECK(!expected.empty(), "there are no texts to compare with");
  MEGATRON_CHECK(written.size() == expected.size(), "there are ", written.size(), " texts for ",
                 expected.size(), " that were asked for");
  std::vector<NamedMetric> metrics = {
      {"exact_match", 0}, {"token_f1", 0}, {"rouge1", 0}, {"rouge2", 0}, {"rougeL", 0}};
  for (size_t i = 0; i < written.size(); ++i) {
    const Words a = rouge_words(written[i]), b = rouge_words(expected[i]);
    const double of_text[] = {
        python_stripped(written[i]) == python_stripped(expected[i]) ? 1.0 : 0.0,
        token_f1(written[i], expected[i]), f1_of(common_elements(a, b), a.size(), b.size()),
        rouge_pairs(a, b), rouge_subsequence(a, b)};
    for (size_t k = 0; k < metrics.size(); ++k) metrics[k].second += of_text[k];
  }
  for (auto& [name, sum] : metrics) sum /= static_cast<double>(written.size());
  return metrics;
}

}  // namespace megatron
