#include "megatron/tokenizers/detail/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/unicode.h"
#include "megatron/tokenizers/detail/utf8.h"

namespace megatron {
namespace {

constexpr utf8proc_int32_t kEnd = 0x110000;

// For each code point whether text made only of such code points is in form C: it has combining
// class 0, is its own form C, and never joins the character before it.
std::vector<bool> find_stable() {
  std::vector<bool> stable(kEnd, true);
  for (utf8proc_int32_t c = 0; c < kEnd; ++c) {
    const utf8proc_property_t* property = utf8proc_get_property(c);
    if (property->combining_class != 0) stable[c] = false;
    utf8proc_int32_t parts[8];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(c, parts, 8, UTF8PROC_DECOMPOSE, &boundary);
    for (utf8proc_ssize_t i = 1; i < count && i < 8; ++i) stable[parts[i]] = false;
    if (count == 1 && parts[0] != c) stable[c] = false;  // replaced by another character
    if (count > 1 && property->comp_exclusion) stable[c] = false;
    // Two-part characters that normalisation takes apart and does not join again.
    if (count > 1) {
      const auto recomposed = utf8proc_normalize_utf32(parts, count, UTF8PROC_COMPOSE);
      if (recomposed != 1 || parts[0] != c) stable[c] = false;
    }
  }
  for (utf8proc_int32_t jamo = 0x1161; jamo <= 0x11ff; ++jamo) stable[jamo] = false;
  return stable;
}

// Marks that utf8proc knows and the package's older tables do not: the package leaves them where
// they are.
bool is_unknown_mark(uint32_t c) {
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class != 0 &&
         (unicode_classes()[c] & 16) == 0;
}

// Appends form C of a stretch of characters. utf8proc_decompose() would sort marks in quadratic
// time.
void append_nfc(std::string_view text, std::vector<utf8proc_int32_t>& parts, std::string& out) {
  parts.clear();
  size_t length;
  for (size_t at = 0; at < text.size(); at += length) {
    utf8proc_int32_t decomposed[8];
    int boundary = 0;
    const auto c = static_cast<utf8proc_int32_t>(decode_utf8(text.data() + at, length));
    const auto count = utf8proc_decompose_char(c, decomposed, 8, UTF8PROC_DECOMPOSE, &boundary);
    MEGATRON_ASSERT(count > 0 && count <= 8);
    parts.insert(parts.end(), decomposed, decomposed + count);
  }
  const auto combining = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  for (auto first = parts.begin(); first != parts.end();) {
    const auto last = std::find_if(first, parts.end(), [&](auto c) { return combining(c) == 0; });
    std::stable_sort(first, last, [&](auto a, auto b) { return combining(a) < combining(b); });
    first = last == parts.end() ? last : last + 1;
  }
  const auto count =
      utf8proc_normalize_utf32(parts.data(), static_cast<utf8proc_ssize_t>(parts.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(static_cast<uint32_t>(parts[i]), out);
}

}  // namespace

// Only stretches of characters that are not stable, each with the one before it, are looked at
// closely.
std::string_view to_nfc(std::string_view text, std::string& buffer) {
  static const std::vector<bool> stable = find_stable();
  const char* const end = text.data() + text.size();
  const char* done = text.data();  // up to here `buffer` is written
  const char* before = done;       // the character before p
  std::vector<utf8proc_int32_t> parts;
  bool changed = false;
  size_t length;
  for (const char* p = done; p < end;) {
    if (static_cast<signed char>(*p) >= 0 || stable[decode_utf8(p, length)]) {
      before = p;
      p += static_cast<signed char>(*p) >= 0 ? 1 : length;
      continue;
    }
    if (!changed) buffer.clear();
    changed = true;
    buffer.append(done, before);
    const char* start = before;
    for (; p < end; p += length) {
      const uint32_t c = decode_utf8(p, length);
      if (stable[c]) break;
      if (!is_unknown_mark(c)) continue;
      append_nfc({start, static_cast<size_t>(p - start)}, parts, buffer);
      buffer.append(p, length);
      start = p + length;
    }
    append_nfc({start, static_cast<size_t>(p - start)}, parts, buffer);
    done = before = p;
  }
  if (!changed) return text;
  buffer.append(done, end);
  return buffer;
}

}  // namespace megatron
