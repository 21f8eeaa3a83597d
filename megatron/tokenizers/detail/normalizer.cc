#include "megatron/tokenizers/detail/normalizer.h"

#include <utf8proc.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/utf8.h"

namespace megatron {
namespace {

constexpr utf8proc_int32_t kEnd = 0x110000;

// For each code point whether text made only of such code points is in form C: it has combining class 0, is its own form C,
// and never joins the character before it.
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

}  // namespace

std::string_view to_nfc(std::string_view text, std::string& buffer) {
  static const std::vector<bool> stable = find_stable();
  const char* p = text.data();
  const char* end = p + text.size();
  while (p < end) {
    if (static_cast<signed char>(*p) >= 0) {
      ++p;
      continue;
    }
    size_t length;
    if (!stable[decode_utf8(p, length)]) break;
    p += length;
  }
  if (p == end) return text;
  utf8proc_uint8_t* mapped = nullptr;
  const auto size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &mapped,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  MEGATRON_CHECK(size >= 0, "Unicode normalisation failed: ", utf8proc_errmsg(size));
  buffer.assign(reinterpret_cast<const char*>(mapped), static_cast<size_t>(size));
  return buffer;
}

}  // namespace megatron
