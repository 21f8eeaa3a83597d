#include "megatron/tokenizers/detail/text/unicode.h"

#include <algorithm>
#include <iterator>
#include <memory>

namespace megatron {
namespace {

constexpr uint32_t kRanges[] = {
#include "megatron/tokenizers/detail/text/unicode_ranges.inc"
};
constexpr uint32_t kTraits[] = {
#include "megatron/tokenizers/detail/text/unicode_traits.inc"
};
struct LowerCaseRun {
  uint32_t first, last, stride;
  int32_t delta;
};
constexpr LowerCaseRun kLowerCase[] = {
#include "megatron/tokenizers/detail/text/unicode_lowercase.inc"
};
constexpr uint32_t kNumCodePoints = 0x110000;

// One value per code point from entries (first code point << kBits) | value.
template <class T, int kBits, size_t kCount>
std::unique_ptr<T[]> expand(const uint32_t (&ranges)[kCount]) {
  auto values = std::make_unique<T[]>(kNumCodePoints);
  for (size_t i = 0; i < kCount; ++i) {
    const uint32_t end = i + 1 < kCount ? ranges[i + 1] >> kBits : kNumCodePoints;
    std::fill(&values[ranges[i] >> kBits], values.get() + end,
              static_cast<T>(ranges[i] & ((1u << kBits) - 1)));
  }
  return values;
}

}  // namespace

const uint8_t* unicode_classes() {
  static const std::unique_ptr<uint8_t[]> classes = expand<uint8_t, 7>(kRanges);
  return classes.get();
}

const uint16_t* unicode_traits() {
  static const std::unique_ptr<uint16_t[]> traits = expand<uint16_t, 9>(kTraits);
  return traits.get();
}

uint32_t lower_case(uint32_t c) {
  if (c < 128) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  if (c == 0x130) return 'i';
  const auto* const run =
      std::lower_bound(std::begin(kLowerCase), std::end(kLowerCase), c,
                       [](const LowerCaseRun& r, uint32_t value) { return r.last < value; });
  if (run == std::end(kLowerCase) || c < run->first || (c - run->first) % run->stride != 0)
    return c;
  return static_cast<uint32_t>(static_cast<int32_t>(c) + run->delta);
}

}  // namespace megatron
