#include "megatron/datasets/multimodal/energon/braces.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr size_t kMostExpanded = 100'000, kMostPattern = 4096;

// Numbers or letters FIRST..LAST[..STEP] of what stands between braces; empty: it is no range.
std::vector<std::string> expanded_range(const std::string& text) {
  std::vector<std::string> ends;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find("..", begin), text.size());
    ends.push_back(text.substr(begin, end - begin));
    begin = end + 2;
  }
  if (ends.size() != 2 && ends.size() != 3) return {};
  const auto is_number = [](const std::string& s) {
    const size_t sign = s.starts_with('-') ? 1 : 0;
    return s.size() > sign && s.size() < sign + 10 &&
           s.find_first_not_of("0123456789", sign) == std::string::npos;
  };
  const bool numbers = is_number(ends[0]) && is_number(ends[1]);
  const bool letters = ends[0].size() == 1 && ends[1].size() == 1 && !numbers;
  if ((!numbers && !letters) || (ends.size() == 3 && !is_number(ends[2]))) return {};
  const int64_t first = numbers ? std::stoll(ends[0]) : ends[0][0],
                last = numbers ? std::stoll(ends[1]) : ends[1][0],
                step = std::max<int64_t>(1, ends.size() == 3 ? std::abs(std::stoll(ends[2])) : 1);
  const auto padded = [&](const std::string& s) {
    return s.size() > 1 && (s[0] == '0' || s.starts_with("-0"));
  };
  const size_t width = numbers && (padded(ends[0]) || padded(ends[1]))
                           ? std::max(ends[0].size(), ends[1].size())
                           : 0;
  std::vector<std::string> out;
  for (int64_t i = 0; i <= std::abs(last - first) / step; ++i) {
    MEGATRON_CHECK(out.size() < kMostExpanded, "{", text, "}: stands for more than ", kMostExpanded,
                   " names");
    const int64_t value = first < last ? first + i * step : first - i * step;
    if (letters) {
      out.emplace_back(1, static_cast<char>(value));
      continue;
    }
    std::string digits = std::to_string(std::abs(value));
    const std::string sign = value < 0 ? "-" : "";
    if (digits.size() + sign.size() < width)
      digits.insert(0, width - sign.size() - digits.size(), '0');
    out.push_back(sign + digits);
  }
  return out;
}

struct Braces {
  size_t open = 0, close = 0;
  std::vector<std::string> items;  // between commas of this depth
};

// The first pair that stands for something; none: false.
bool find_braces(const std::string& text, Braces& out) {
  for (size_t open = text.find('{'); open != std::string::npos; open = text.find('{', open + 1)) {
    int depth = 0;
    std::vector<std::string> items(1);
    for (size_t i = open; i < text.size(); ++i) {
      if (text[i] == '{' && ++depth == 1) continue;
      if (text[i] == '}' && --depth == 0) {
        if (items.size() == 1) items = expanded_range(items[0]);
        if (items.empty()) break;
        out = {open, i, std::move(items)};
        return true;
      }
      if (text[i] == ',' && depth == 1)
        items.emplace_back();
      else
        items.back() += text[i];
    }
  }
  return false;
}

}  // namespace

std::vector<std::string> expanded_braces(const std::string& text) {
  MEGATRON_CHECK(text.size() <= kMostPattern, text.substr(0, 40), "...: a name of ", text.size(),
                 " bytes");
  Braces braces;
  if (!find_braces(text, braces)) return {text};
  std::vector<std::string> out;
  for (const std::string& item : braces.items)
    for (std::string& one :
         expanded_braces(cat(text.substr(0, braces.open), item, text.substr(braces.close + 1)))) {
      MEGATRON_CHECK(out.size() < kMostExpanded, text, ": stands for more than ", kMostExpanded,
                     " names");
      out.push_back(std::move(one));
    }
  return out;
}

}  // namespace megatron
