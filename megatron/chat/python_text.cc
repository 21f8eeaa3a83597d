#include "megatron/chat/python_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "megatron/base/utf8.h"

namespace megatron {
namespace {

std::string mapped(std::string_view text, utf8proc_int32_t (*map)(utf8proc_int32_t)) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Character c = decode_utf8(text, i);
    if (c.valid) {
      python_append_code_point(static_cast<uint32_t>(map(static_cast<utf8proc_int32_t>(c.code))),
                               out);
    } else {
      out += text[i];
    }
    i += static_cast<size_t>(c.bytes);
  }
  return out;
}

}  // namespace

int64_t python_length(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

size_t python_offset(std::string_view text, int64_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) {
    ++at;
    while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) ++at;
  }
  return at;
}

void python_append_code_point(uint32_t code, std::string& out) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes);
  out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
}

// The upper case of the sharp s has two letters.
std::string python_upper_case(std::string_view text) {
  constexpr std::string_view kSharpS = "\u00df";
  std::string out;
  for (size_t sharp; (sharp = text.find(kSharpS)) != std::string_view::npos;) {
    out += mapped(text.substr(0, sharp), utf8proc_toupper) + "SS";
    text.remove_prefix(sharp + kSharpS.size());
  }
  return out + mapped(text, utf8proc_toupper);
}
std::string python_lower_case(std::string_view text) { return mapped(text, utf8proc_tolower); }

std::string python_capitalized(std::string_view text) {
  if (text.empty()) return "";
  const auto first = static_cast<size_t>(decode_utf8(text, 0).bytes);
  return mapped(text.substr(0, first), utf8proc_totitle) + python_lower_case(text.substr(first));
}

bool python_is_space(uint32_t code) {
  if (code < 0x80)
    return code == ' ' || (code >= 9 && code <= 13) || (code >= 0x1c && code <= 0x1f);
  if (code == 0x85) return true;
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code));
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

std::string python_stripped(std::string_view text, const std::string* chars, bool left,
                            bool right) {
  std::vector<uint32_t> set;
  for (size_t i = 0; chars != nullptr && i < chars->size();) {
    const Utf8Character c = decode_utf8(*chars, i);
    set.push_back(c.code);
    i += static_cast<size_t>(c.bytes);
  }
  const auto goes = [&](uint32_t code) {
    return chars == nullptr ? python_is_space(code)
                            : std::find(set.begin(), set.end(), code) != set.end();
  };
  size_t begin = 0, end = text.size();
  while (left && begin < end) {
    const Utf8Character c = decode_utf8(text, begin);
    if (!goes(c.code)) break;
    begin += static_cast<size_t>(c.bytes);
  }
  while (right && end > begin) {
    size_t start = end - 1;
    while (start > begin && (static_cast<unsigned char>(text[start]) & 0xc0) == 0x80) --start;
    if (!goes(decode_utf8(text, start).code)) break;
    end = start;
  }
  return std::string(text.substr(begin, end - begin));
}

}  // namespace megatron
