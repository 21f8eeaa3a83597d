// Text from values: "1.2 GB", "81,204", "1:02:03", "a, b and c".
#pragma once

#include <cstdint>
#include <ctime>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/check.h"

namespace megatron {

// Decimal units with about three significant digits: "512 B", "31.0 MB", "2.8 GB".
std::string format_bytes(double bytes);

// Thousands separated by commas.
std::string format_count(uint64_t count);

// "0:52", "12:04", "1:02:03", "2 days 3:04:05"; rounded to seconds.
std::string format_duration(double seconds);

// With so many digits after the point: "3.14".
std::string format_fixed(double value, int digits);

// "[2,3,4]", as JSON has it.
std::string format_shape(std::span<const int64_t> sizes);

// "1, 2, 3, 6": the numbers that divide n.
std::string format_divisors(int64_t n);

// What printf prints.
[[gnu::format(printf, 1, 2)]] std::string format_text(const char* form, ...);

// 16 digits: "00000000000000ff".
std::string format_hex(uint64_t value);

// By strftime's form, in local time or UTC.
std::string format_time(std::time_t time, const char* form, bool utc = false);

// "a, b": each item as `text_of` gives it, a function or a member.
template <class Items, class TextOf = std::identity>
std::string listed(const Items& items, const TextOf& text_of = {},
                   std::string_view separator = ", ") {
  std::string out;
  bool first = true;
  for (const auto& item : items) {
    out += cat(first ? "" : separator, std::invoke(text_of, item));
    first = false;
  }
  return out;
}

// A line for each row, with columns two spaces apart; `right`: which columns are aligned right.
std::vector<std::string> format_table(const std::vector<std::vector<std::string>>& rows,
                                      const std::function<bool(size_t column)>& right);

// The texts between separators that are not empty.
std::vector<std::string> split(std::string_view text, char separator = ' ');

// With `to` in place of every `from`, which is not empty.
std::string replaced(std::string_view text, std::string_view from, std::string_view to);

}  // namespace megatron
