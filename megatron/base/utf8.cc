#include "megatron/base/utf8.h"

namespace megatron {

Utf8Character decode_utf8(std::string_view text, size_t offset) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[offset + i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {first, 1, true};
  const int bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() - offset < static_cast<size_t>(bytes)) return {};
  uint32_t code = first & (0xFFu >> (bytes + 1));
  for (int i = 1; i < bytes; ++i) {
    if ((byte(static_cast<size_t>(i)) & 0xC0) != 0x80) return {};
    code = code << 6 | (byte(static_cast<size_t>(i)) & 0x3Fu);
  }
  const bool overlong = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000);
  if (overlong || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return {};
  return {code, bytes, true};
}

bool is_valid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Character c = decode_utf8(text, i);
    if (!c.valid) return false;
    i += static_cast<size_t>(c.bytes);
  }
  return true;
}

}  // namespace megatron
