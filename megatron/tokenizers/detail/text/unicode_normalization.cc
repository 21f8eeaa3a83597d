#include "megatron/tokenizers/detail/text/unicode_normalization.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/text/unicode.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

constexpr utf8proc_int32_t kEnd = 0x110000;
constexpr size_t kMaxParts = 24;  // the longest decomposition has 18 characters

bool composes(NormalForm form) { return form == NormalForm::kNfc || form == NormalForm::kNfkc; }
bool is_compatible(NormalForm form) {
  return form == NormalForm::kNfkc || form == NormalForm::kNfkd;
}

// The combining class; 0 for marks that are newer than the package's tables.
int combining_class(uint32_t c) {
  if ((unicode_classes()[c] & 16) == 0) return 0;
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
}

// Decomposes one character into `parts`; characters unknown to the package are kept.
size_t decompose(uint32_t c, bool compatible, utf8proc_int32_t* parts) {
  if ((unicode_traits()[c] & (compatible ? kCompatible : kCanonical)) == 0) {
    parts[0] = static_cast<utf8proc_int32_t>(c);
    return 1;
  }
  int boundary = 0;
  const int options = UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0);
  const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), parts, kMaxParts,
                                             static_cast<utf8proc_option_t>(options), &boundary);
  MEGATRON_ASSERT(count > 0 && count <= static_cast<utf8proc_ssize_t>(kMaxParts));
  return static_cast<size_t>(count);
}

// For each code point whether text made only of such code points is normalised: it has combining
// class 0, is its own normal form, and never joins the preceding character.
std::vector<bool> find_stable(NormalForm form) {
  std::vector<bool> stable(kEnd, true);
  for (utf8proc_int32_t c = 0; c < kEnd; ++c) {
    const auto code = static_cast<uint32_t>(c);
    const uint16_t traits = unicode_traits()[code];
    if (combining_class(code) != 0) stable[c] = false;
    if ((traits & (is_compatible(form) ? kCompatible : kCanonical)) == 0) continue;
    if (!composes(form)) {
      stable[c] = false;
      continue;
    }
    utf8proc_int32_t parts[kMaxParts];
    if ((traits & kCanonical) != 0) {
      const size_t count = decompose(code, false, parts);
      for (size_t i = 1; i < count; ++i) stable[parts[i]] = false;
    }
    const size_t count = decompose(code, is_compatible(form), parts);
    // Characters that normalisation decomposes and does not recompose.
    const auto joined =
        utf8proc_normalize_utf32(parts, static_cast<utf8proc_ssize_t>(count), UTF8PROC_COMPOSE);
    if (joined != 1 || parts[0] != c) stable[c] = false;
  }
  if (composes(form)) {
    for (utf8proc_int32_t jamo = 0x1161; jamo <= 0x11ff; ++jamo) stable[jamo] = false;
  }
  return stable;
}

const std::vector<bool>& stable_in(NormalForm form) {
  static const std::array<std::vector<bool>, 4> stable = {
      find_stable(NormalForm::kNfc), find_stable(NormalForm::kNfd), find_stable(NormalForm::kNfkc),
      find_stable(NormalForm::kNfkd)};
  return stable[static_cast<size_t>(form)];
}

// Appends the normal form of a stretch of characters. utf8proc_decompose() would sort marks in
// quadratic time.
void append_form(NormalForm form, std::string_view text, std::vector<utf8proc_int32_t>& parts,
                 std::string& out) {
  parts.clear();
  size_t length;
  for (size_t at = 0; at < text.size(); at += length) {
    utf8proc_int32_t decomposed[kMaxParts];
    const size_t count =
        decompose(decode_utf8(text.data() + at, length), is_compatible(form), decomposed);
    parts.insert(parts.end(), decomposed, decomposed + count);
  }
  const auto combining = [](utf8proc_int32_t c) {
    return combining_class(static_cast<uint32_t>(c));
  };
  for (auto first = parts.begin(); first != parts.end();) {
    const auto last = std::find_if(first, parts.end(), [&](auto c) { return combining(c) == 0; });
    std::stable_sort(first, last, [&](auto a, auto b) { return combining(a) < combining(b); });
    first = last == parts.end() ? last : last + 1;
  }
  auto count = static_cast<utf8proc_ssize_t>(parts.size());
  if (composes(form)) {
    count = utf8proc_normalize_utf32(
        parts.data(), count, static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  }
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(static_cast<uint32_t>(parts[i]), out);
}

}  // namespace

// Only stretches of unstable characters, each with the character before it, are normalised.
std::string_view to_normal_form(NormalForm form, std::string_view text, std::string& buffer) {
  const std::vector<bool>& stable = stable_in(form);
  const char* const end = text.data() + text.size();
  const char* done = text.data();  // up to here text is in `buffer`
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
    while (p < end && !stable[decode_utf8(p, length)]) p += length;
    append_form(form, {before, static_cast<size_t>(p - before)}, parts, buffer);
    done = before = p;
  }
  if (!changed) return text;
  buffer.append(done, end);
  return buffer;
}

}  // namespace megatron
