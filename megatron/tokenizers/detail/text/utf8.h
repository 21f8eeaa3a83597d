// UTF-8: validation, repair, and decoding of one code point from well-formed text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace megatron {

// The length of the longest well-formed prefix of `text`.
size_t valid_utf8_prefix(std::string_view text);

// Appends `text` with each ill-formed sequence (maximal subpart, as defined by Python and the
// Unicode standard) replaced by U+FFFD. Returns the number of replacements.
uint64_t append_repaired_utf8(std::string_view text, std::string& out);

// The length of an incomplete sequence at the end of `text` (0 to 3) that more bytes could
// complete; the text before it is well-formed.
size_t incomplete_utf8_suffix(std::string_view text);

void append_utf8(uint32_t code_point, std::string& out);

// The code point at `p`, which starts a well-formed sequence; sets its length.
inline uint32_t decode_utf8(const char* p, size_t& length) {
  const auto* b = reinterpret_cast<const unsigned char*>(p);
  if (b[0] < 0x80) {
    length = 1;
    return b[0];
  }
  if (b[0] < 0xe0) {
    length = 2;
    return (b[0] & 0x1fu) << 6 | (b[1] & 0x3fu);
  }
  if (b[0] < 0xf0) {
    length = 3;
    return (b[0] & 0x0fu) << 12 | (b[1] & 0x3fu) << 6 | (b[2] & 0x3fu);
  }
  length = 4;
  return (b[0] & 0x07u) << 18 | (b[1] & 0x3fu) << 12 | (b[2] & 0x3fu) << 6 | (b[3] & 0x3fu);
}

// The start of the code point that ends before `p` in well-formed text.
inline const char* previous_utf8(const char* p) {
  do {
    --p;
  } while ((static_cast<unsigned char>(*p) & 0xc0) == 0x80);
  return p;
}

}  // namespace megatron
