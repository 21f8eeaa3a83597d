// Character classes of the `tokenizers` package, the same on every machine, independent of its
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

// One byte per code point, 1.1 MB, built at the first call.
//   bits 0 to 2  the CharClass
//   bit 3        a word character (\w)
//   bit 4        has a combining class other than 0 in the package's tables for NFC
//   bits 5, 6    the LetterCase
const uint8_t* unicode_classes();

// Classes for splitting camel case; letters without case and marks belong to both.
enum LetterCase : uint8_t {
  kUpperOrUncased = 32,  // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]
  kLowerOrUncased = 64,  // [\p{Ll}\p{Lm}\p{Lo}\p{M}]
};

enum CharTrait : uint16_t {
  kPunctuation = 1,   // of Punctuation and BertPreTokenizer
  kControl = 2,       // removed by BertNormalizer's clean_text
  kNonspacing = 4,    // removed by BertNormalizer's strip_accents
  kMark = 8,          // removed by StripAccents
  kExtends = 16,      // in the grapheme cluster of the preceding character
  kPrepends = 32,     // the following character is in its grapheme cluster
  kBreaks = 64,       // always its own grapheme cluster
  kCanonical = 128,   // changed by NFD
  kCompatible = 256,  // changed by NFKD
};

// The CharTraits of each code point, 2.2 MB, built at the first call.
const uint16_t* unicode_traits();

// Whether Rust and Python consider it white space: the classes kSpace and kNewline.
inline bool is_space(uint32_t c) { return (unicode_classes()[c] & 7) >= kSpace; }

// The lower case of `c` without context. U+0130 has two characters: this gives the first, 'i', and
// U+0307 follows it.
uint32_t lower_case(uint32_t c);

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
