#include "megatron/base/format.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <iterator>

namespace megatron {

std::string format_bytes(double bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  while (bytes >= 999.95 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000;
    ++unit;
  }
  return format_fixed(bytes, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

std::string format_count(uint64_t count) {
  std::string digits = std::to_string(count);
  for (size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ',');
  return digits;
}

std::string format_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e15) return "?";
  const auto total = static_cast<uint64_t>(std::llround(seconds));
  const unsigned s = total % 60, m = total / 60 % 60, h = total / 3600 % 24;
  const uint64_t days = total / 86400;
  if (days > 0)
    return cat(days, days == 1 ? " day " : " days ", format_text("%u:%02u:%02u", h, m, s));
  return h > 0 ? format_text("%u:%02u:%02u", h, m, s) : format_text("%u:%02u", m, s);
}

std::string format_fixed(double value, int digits) { return format_text("%.*f", digits, value); }

std::string format_shape(std::span<const int64_t> sizes) {
  return "[" + listed(sizes, {}, ",") + "]";
}

std::string format_divisors(int64_t n) {
  std::string text;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) text += (text.empty() ? "" : ", ") + std::to_string(d);
  return text;
}

std::string format_text(const char* form, ...) {
  va_list values, again;
  va_start(values, form);
  va_copy(again, values);
  std::string text(static_cast<size_t>(std::max(0, std::vsnprintf(nullptr, 0, form, values))), ' ');
  std::vsnprintf(text.data(), text.size() + 1, form, again);
  va_end(again);
  va_end(values);
  return text;
}

std::string format_hex(uint64_t value) {
  std::string digits(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) digits[i] = "0123456789abcdef"[value & 15];
  return digits;
}

std::string format_time(std::time_t time, const char* form, bool utc) {
  std::tm parts{};
  utc ? gmtime_r(&time, &parts) : localtime_r(&time, &parts);
  char text[64];
  return std::string(text, std::strftime(text, sizeof text, form, &parts));
}

std::vector<std::string> format_table(const std::vector<std::vector<std::string>>& rows,
                                      const std::function<bool(size_t column)>& right) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::vector<std::string> lines;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - row[i].size(), ' ');
      line += (i > 0 ? "  " : "") + (right(i) ? gap + row[i] : row[i] + gap);
    }
    lines.push_back(line.substr(0, line.find_last_not_of(' ') + 1));
  }
  return lines;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find(separator, begin), text.size());
    if (end > begin) parts.emplace_back(text.substr(begin, end - begin));
  }
  return parts;
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at = 0;;) {
    const size_t found = text.find(from, at);
    out += text.substr(at, found - at);
    if (found == text.npos) return out;
    out += to;
    at = found + from.size();
  }
}

}  // namespace megatron
