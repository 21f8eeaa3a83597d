#include "megatron/tokenizers/detail/text/byte_level.h"

#include <array>

#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

// Bytes that are printable in Latin-1 map to themselves; the others to 256, 257, ... in order.
struct Alphabet {
  std::array<uint16_t, 256> chars{};
  std::array<int16_t, 0x200> bytes{};
  constexpr Alphabet() {
    bytes.fill(-1);
    uint16_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
      chars[byte] = printable ? static_cast<uint16_t>(byte) : next++;
      bytes[chars[byte]] = static_cast<int16_t>(byte);
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

uint32_t byte_level_char(unsigned char byte) { return kAlphabet.chars[byte]; }

void append_byte_level(std::string_view bytes, std::string& out) {
  for (const char c : bytes) append_utf8(byte_level_char(static_cast<unsigned char>(c)), out);
}

bool parse_byte_level(std::string_view spelling, std::string& out) {
  out.clear();
  size_t length;
  for (size_t at = 0; at < spelling.size(); at += length) {
    const uint32_t c = decode_utf8(spelling.data() + at, length);
    if (c >= kAlphabet.bytes.size() || kAlphabet.bytes[c] < 0) return false;
    out += static_cast<char>(kAlphabet.bytes[c]);
  }
  return true;
}

}  // namespace megatron
