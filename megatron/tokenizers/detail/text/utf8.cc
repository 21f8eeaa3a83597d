#include "megatron/tokenizers/detail/text/utf8.h"

#include <cstring>

namespace megatron {
namespace {

// What a lead byte allows: the number of following bytes, and the range of the first of them
// (Unicode table 3-7).
struct Lead {
  int following;  // -1: not a lead byte
  unsigned char low = 0x80, high = 0xbf;
};

Lead classify(unsigned char byte) {
  if (byte < 0x80) return {0};
  if (byte < 0xc2) return {-1};
  if (byte < 0xe0) return {1};
  if (byte == 0xe0) return {2, 0xa0, 0xbf};
  if (byte == 0xed) return {2, 0x80, 0x9f};
  if (byte < 0xf0) return {2};
  if (byte == 0xf0) return {3, 0x90, 0xbf};
  if (byte < 0xf4) return {3};
  if (byte == 0xf4) return {3, 0x80, 0x8f};
  return {-1};
}

// The number of valid bytes of the sequence at `p`: its whole length, or, if `complete` is false,
// the maximal subpart.
size_t sequence_length(const unsigned char* p, const unsigned char* end, bool& complete) {
  const Lead lead = classify(*p);
  complete = lead.following >= 0;
  if (lead.following <= 0) return 1;
  for (int i = 1; i <= lead.following; ++i) {
    const unsigned char low = i == 1 ? lead.low : 0x80, high = i == 1 ? lead.high : 0xbf;
    if (p + i >= end || p[i] < low || p[i] > high) {
      complete = false;
      return static_cast<size_t>(i);
    }
  }
  return static_cast<size_t>(lead.following) + 1;
}

}  // namespace

size_t valid_utf8_prefix(std::string_view text) {
  const auto* begin = reinterpret_cast<const unsigned char*>(text.data());
  const auto* end = begin + text.size();
  const auto* p = begin;
  while (p < end) {
    while (end - p >= 16) {  // sixteen bytes of ASCII at once
      uint64_t a, b;
      std::memcpy(&a, p, 8);
      std::memcpy(&b, p + 8, 8);
      if (((a | b) & 0x8080808080808080u) != 0) break;
      p += 16;
    }
    if (p == end) break;
    bool complete = true;
    const size_t length = *p < 0x80 ? 1 : sequence_length(p, end, complete);
    if (!complete) break;
    p += length;
  }
  return static_cast<size_t>(p - begin);
}

uint64_t append_repaired_utf8(std::string_view text, std::string& out) {
  uint64_t replaced = 0;
  for (;;) {
    const size_t valid = valid_utf8_prefix(text);
    out.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) return replaced;
    const auto* p = reinterpret_cast<const unsigned char*>(text.data());
    bool complete = true;
    text.remove_prefix(sequence_length(p, p + text.size(), complete));
    out += "\xef\xbf\xbd";
    ++replaced;
  }
}

size_t incomplete_utf8_suffix(std::string_view text) {
  const auto* begin = reinterpret_cast<const unsigned char*>(text.data());
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto* p = begin + text.size() - back;
    if ((*p & 0xc0) == 0x80) continue;
    bool complete = true;
    const Lead lead = classify(*p);
    const size_t length = sequence_length(p, begin + text.size(), complete);
    return !complete && lead.following > 0 && length == back ? back : 0;
  }
  return 0;
}

void append_utf8(uint32_t c, std::string& out) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xc0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3f));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

}  // namespace megatron
