// GPT-2's printable spelling of bytes: each byte is one character of a 256-letter alphabet.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace megatron {

// The code point that spells `byte`.
uint32_t byte_level_char(unsigned char byte);

// Appends the spelling of `bytes`.
void append_byte_level(std::string_view bytes, std::string& out);

// Decodes a spelling to bytes; false (and `out` unspecified) if a character is not in the alphabet.
bool parse_byte_level(std::string_view spelling, std::string& out);

}  // namespace megatron
