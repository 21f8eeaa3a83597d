// Character classes as the `tokenizers` package sees them, the same on every machine whatever its
// Unicode libraries.
#pragma once

#include <array>
#include <cstdint>

namespace megatron {

enum CharClass : uint8_t {
  kOther = 0,    // neither of the following
  kLetter = 1,   // \p{L}
  kNumber = 2,   // \p{N}
  kSpace = 3,    // \s without \r and \n
  kNewline = 4,  // \r and \n
};

// One byte per code point, 1.1 MB, made at the first call.
//   bits 0 to 2  the CharClass
//   bit 3        a word character (\w)
//   bit 4        has a combining class other than 0 in the package's tables for NFC
const uint8_t* unicode_classes();

// The classes of the ASCII characters by byte; kAboveAscii for the bytes of longer sequences.
inline constexpr uint8_t kAboveAscii = 7;
inline constexpr std::array<uint8_t, 256> kByteClass = [] {
  std::array<uint8_t, 256> classes{};
  for (int c = 0; c < 256; ++c) {
    if (c >= 128) {
      classes[c] = kAboveAscii;
    } else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
      classes[c] = kLetter;
    } else if (c >= '0' && c <= '9') {
      classes[c] = kNumber;
    } else if (c == '\r' || c == '\n') {
      classes[c] = kNewline;
    } else if (c == ' ' || (c >= 9 && c <= 13)) {
      classes[c] = kSpace;
    }
  }
  return classes;
}();

}  // namespace megatron
