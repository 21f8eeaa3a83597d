#include "megatron/inference/evaluation/answer_scores.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <optional>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"
#include "megatron/chat/python_text.h"

namespace megatron {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Words between white space.
std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> out;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character c = decode_utf8(text, at);
    const auto bytes = static_cast<size_t>(c.bytes);
    if (c.valid && python_is_space(c.code)) {
      inside = false;
    } else {
      if (!inside) out.emplace_back();
      out.back() += text.substr(at, bytes);
      inside = true;
    }
    at += bytes;
  }
  return out;
}

std::string joined(std::span<const std::string> words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

std::vector<uint32_t> characters_of(const std::string& text) {
  std::vector<uint32_t> out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character c = decode_utf8(text, at);
    out.push_back(c.code);
    at += static_cast<size_t>(c.bytes);
  }
  return out;
}

// Insertions, deletions and substitutions.
size_t edits(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t corner = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = corner + (a[i - 1] == b[j - 1] ? 0 : 1);
      corner = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, changed});
    }
  }
  return row[b.size()];
}

// A number, or a percentage as a hundredth.
std::optional<double> number_of(std::string_view text) {
  const bool percent = text.ends_with('%');
  while (text.ends_with('%')) text.remove_suffix(1);
  const std::string trimmed = python_stripped(text);
  const char* begin = trimmed.data();
  const char* const end = begin + trimmed.size();
  if (begin != end && *begin == '+') ++begin;
  double value = 0;
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (begin == end || stop != end || error != std::errc()) return {};
  return percent ? value / 100 : value;
}

}  // namespace

std::string vqa_text(std::string_view text) {
  constexpr std::string_view kPunctuation = ";/[]\"{}()=+\\_-><@`,?!.";
  constexpr std::string_view kNumbers[] = {"zero", "one",   "two",   "three", "four", "five",
                                           "six",  "seven", "eight", "nine",  "ten"};
  std::string plain = python_lower_case(text);
  for (size_t i = 0; i < plain.size(); ++i) {
    const bool in_number =
        i > 0 && i + 1 < plain.size() && is_digit(plain[i - 1]) && is_digit(plain[i + 1]);
    if (kPunctuation.find(plain[i]) != std::string_view::npos && !in_number) plain[i] = ' ';
  }
  std::vector<std::string> words = words_of(plain);
  std::erase_if(words, [](const std::string& w) { return w == "a" || w == "an" || w == "the"; });
  for (std::string& word : words) {
    const auto* const found = std::ranges::find(kNumbers, word);
    if (found != std::end(kNumbers)) word = std::to_string(found - std::begin(kNumbers));
    if (word == "none") word = "0";
  }
  return joined(words);
}

double vqa_score(std::string_view answer, std::span<const std::string> right) {
  MEGATRON_ASSERT(!right.empty(), "no right answer");
  const std::string own = vqa_text(answer);
  const auto equal = static_cast<double>(
      std::ranges::count_if(right, [&](const std::string& r) { return vqa_text(r) == own; }));
  const auto count = static_cast<double>(right.size());
  if (count == 1) return equal;
  // Without one of them: of the equal ones, or of the others.
  const double enough = std::min(3.0, count - 1);
  const double without_equal = std::min((equal - 1) / enough, 1.0),
               without_other = std::min(equal / enough, 1.0);
  return (equal * without_equal + (count - equal) * without_other) / count;
}

double anls_score(std::string_view answer, std::span<const std::string> right) {
  const auto plain = [](std::string_view text) {
    return characters_of(joined(words_of(python_lower_case(text))));
  };
  const std::vector<uint32_t> own = plain(answer);
  double best = 0;
  for (const std::string& text : right) {
    const std::vector<uint32_t> other = plain(text);
    const size_t longer = std::max(own.size(), other.size());
    const double far =
        longer == 0 ? 0 : static_cast<double>(edits(own, other)) / static_cast<double>(longer);
    best = std::max(best, 1 - far);
  }
  return best < 0.5 ? 0 : best;
}

double relaxed_score(std::string_view answer, std::span<const std::string> right) {
  constexpr double kTolerance = 0.05;
  const std::string own = python_stripped(answer);
  const std::optional<double> number = number_of(own);
  const auto fits = [&](const std::string& text) {
    const std::string other = python_stripped(text);
    const std::optional<double> target = number_of(other);
    if (number && target && *target != 0)
      return std::abs(*number - *target) / std::abs(*target) <= kTolerance;
    return python_lower_case(own) == python_lower_case(other);
  };
  return std::ranges::any_of(right, fits) ? 1 : 0;
}

double exact_score(std::string_view answer, std::span<const std::string> right) {
  const std::string own = python_stripped(answer);
  return std::ranges::any_of(right, [&](const std::string& r) { return python_stripped(r) == own; })
             ? 1
             : 0;
}

}  // namespace megatron
