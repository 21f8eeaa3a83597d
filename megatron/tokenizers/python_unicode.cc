#include "megatron/tokenizers/python_unicode.h"

#include <algorithm>
#include <memory>

#include "megatron/tokenizers/detail/text/unicode.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

constexpr uint32_t kPythonRanges[] = {
#include "megatron/tokenizers/detail/text/python_ranges.inc"
};
constexpr size_t kNumPythonRanges = std::size(kPythonRanges);
constexpr uint32_t kAllCodePoints = 0x110000;
constexpr uint32_t kCapitalSigma = 0x3a3, kSmallSigma = 0x3c3, kFinalSigma = 0x3c2;

std::unique_ptr<uint8_t[]> expand_python_ranges() {
  auto classes = std::make_unique<uint8_t[]>(kAllCodePoints);
  for (size_t i = 0; i < kNumPythonRanges; ++i) {
    const uint32_t end = i + 1 < kNumPythonRanges ? kPythonRanges[i + 1] >> 7 : kAllCodePoints;
    std::fill(&classes[kPythonRanges[i] >> 7], classes.get() + end,
              static_cast<uint8_t>(kPythonRanges[i] & 127));
  }
  return classes;
}

// A sigma is final between a cased character and none, whatever ignorable ones lie between.
bool is_final_sigma(std::string_view text, size_t begin, size_t end) {
  const uint8_t* const classes = python_classes();
  const char* at = text.data() + begin;
  size_t length = 0;
  uint8_t before = kPythonSigmaIgnored;
  while (at > text.data() && (before & kPythonSigmaIgnored) != 0) {
    at = previous_utf8(at);
    before = classes[decode_utf8(at, length)];
  }
  if ((before & kPythonSigmaCased) == 0) return false;
  uint8_t after = kPythonSigmaIgnored;
  for (; end < text.size() && (after & kPythonSigmaIgnored) != 0; end += length)
    after = classes[decode_utf8(text.data() + end, length)];
  return (after & kPythonSigmaCased) == 0;
}

}  // namespace

const uint8_t* python_classes() {
  static const std::unique_ptr<uint8_t[]> classes = expand_python_ranges();
  return classes.get();
}

void append_python_lower(std::string_view text, std::string& out) {
  size_t length = 0;
  for (size_t at = 0; at < text.size(); at += length) {
    const uint32_t c = decode_utf8(text.data() + at, length);
    if (c == kCapitalSigma) {
      append_utf8(is_final_sigma(text, at, at + length) ? kFinalSigma : kSmallSigma, out);
      continue;
    }
    append_utf8(lower_case(c), out);
    if (c == 0x130) append_utf8(0x307, out);
  }
}

}  // namespace megatron
