// UTF-8 decoding; nothing that needs Unicode tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace megatron {

// One decoded character. `valid` is false for a byte that starts no well-formed sequence (including
// overlong forms, surrogates and values above U+10FFFF); then `bytes` is 1.
struct Utf8Character {
  uint32_t code = 0;
  int bytes = 1;
  bool valid = false;
};

// Decodes the character at text[offset]; offset must be below text.size().
Utf8Character decode_utf8(std::string_view text, size_t offset);

bool is_valid_utf8(std::string_view text);

}  // namespace megatron
