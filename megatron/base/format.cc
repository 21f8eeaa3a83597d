#include "megatron/base/format.h"

#include <cmath>
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
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
  return text;
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
  char text[80];
  if (days > 0)
    std::snprintf(text, sizeof text, "%llu day%s %u:%02u:%02u",
                  static_cast<unsigned long long>(days), days == 1 ? "" : "s", h, m, s);
  else if (h > 0)
    std::snprintf(text, sizeof text, "%u:%02u:%02u", h, m, s);
  else
    std::snprintf(text, sizeof text, "%u:%02u", m, s);
  return text;
}

std::string format_fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string format_shape(std::span<const int64_t> sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
  return "[" + text + "]";
}

std::string format_divisors(int64_t n) {
  std::string text;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) text += (text.empty() ? "" : ", ") + std::to_string(d);
  return text;
}

}  // namespace megatron
