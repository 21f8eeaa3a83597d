#include "megatron/tokenizers/detail/unicode.h"

#include <algorithm>
#include <iterator>
#include <memory>

namespace megatron {
namespace {

constexpr uint32_t kRanges[] = {
#include "megatron/tokenizers/detail/unicode_ranges.inc"
};
constexpr uint32_t kNumCodePoints = 0x110000;

std::unique_ptr<uint8_t[]> expand() {
  auto classes = std::make_unique<uint8_t[]>(kNumCodePoints);
  for (size_t i = 0; i < std::size(kRanges); ++i) {
    const uint32_t end = i + 1 < std::size(kRanges) ? kRanges[i + 1] >> 5 : kNumCodePoints;
    std::fill(&classes[kRanges[i] >> 5], classes.get() + end,
              static_cast<uint8_t>(kRanges[i] & 31));
  }
  return classes;
}

}  // namespace

const uint8_t* unicode_classes() {
  static const std::unique_ptr<uint8_t[]> classes = expand();
  return classes.get();
}

}  // namespace megatron
