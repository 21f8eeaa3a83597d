#include "megatron/tokenizers/detail/text/charsmap.h"

#include <cstring>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/text/unicode.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

// The fields of a unit of Darts-clone.
bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t value_of(uint32_t unit) { return unit & 0x7fffffffu; }
uint32_t label_of(uint32_t unit) { return unit & 0x800000ffu; }
uint32_t offset_of(uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); }

// Whether `c` is a byte of a character but not its first.
bool is_inside(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// The length of the grapheme cluster at the start of `text`. Only clusters of up to 5 bytes matter,
// so conjuncts, Hangul syllables, flags and joined emoji, which are longer, may be split.
size_t cluster_length(std::string_view text) {
  const uint16_t* traits = unicode_traits();
  size_t length, at = 0;
  uint32_t c = decode_utf8(text.data(), length);
  if (c == '\r' && text.size() > 1 && text[1] == '\n') return 2;
  at = length;
  if ((traits[c] & kBreaks) != 0) return at;
  while ((traits[c] & kPrepends) != 0 && at < text.size()) {
    const uint32_t next = decode_utf8(text.data() + at, length);
    if ((traits[next] & kBreaks) != 0) return at;
    c = next;
    at += length;
  }
  while (at < text.size()) {
    if ((traits[decode_utf8(text.data() + at, length)] & kExtends) == 0) break;
    at += length;
  }
  return at;
}

}  // namespace

Charsmap::Charsmap(std::string_view blob, std::string_view where) {
  uint32_t size = 0;
  MEGATRON_CHECK(blob.size() > sizeof(size), where, " has ", blob.size(),
                 " bytes, expected a size and a trie");
  std::memcpy(&size, blob.data(), sizeof(size));
  blob.remove_prefix(sizeof(size));
  MEGATRON_CHECK(size >= 4 && size % 4 == 0 && size < blob.size(), where,
                 " says that its trie has ", size, " bytes, but ", blob.size(), " follow");
  units_.resize(size / 4);
  std::memcpy(units_.data(), blob.data(), size);
  replacements_ = blob.substr(size);
  MEGATRON_CHECK(valid_utf8_prefix(replacements_) == replacements_.size(), where,
                 ": the replacements are not UTF-8");
  if (replacements_.back() != '\0') replacements_ += '\0';
  std::string_view ignored;
  for (int c = 0; c < 128; ++c) {
    plain_[c] = c != '\r';
    for (int next = 0; next < 128 && plain_[c]; ++next) {
      const char pair[2] = {static_cast<char>(c), static_cast<char>(next)};
      plain_[c] = find_longest({pair, 2}, ignored) == 0;
    }
  }
}

size_t Charsmap::find(std::string_view text, bool shortest, std::string_view& replacement) const {
  if (units_.empty()) return 0;
  size_t found = 0;
  uint32_t position = offset_of(units_[0]);
  for (size_t i = 0; i < text.size() && text[i] != '\0'; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    position ^= byte;
    if (position >= units_.size() || label_of(units_[position]) != byte) break;
    const uint32_t unit = units_[position];
    position ^= offset_of(unit);
    if (!has_leaf(unit)) continue;
    if (position >= units_.size()) break;
    const uint32_t value = value_of(units_[position]);
    if (value >= replacements_.size()) break;
    // Rules and replacements are whole characters; a damaged trie could point into one.
    const bool whole = (i + 1 == text.size() || !is_inside(text[i + 1]));
    if (!whole || is_inside(replacements_[value])) continue;
    replacement = std::string_view(replacements_.data() + value);  // ends at a zero byte
    found = i + 1;
    if (shortest) break;
  }
  return found;
}

void Charsmap::append_by_clusters(std::string_view text, std::string& out) const {
  constexpr size_t kMaxCluster = 5;
  std::string_view replacement;
  while (!text.empty()) {
    size_t plain = 0;
    while (plain + 1 < text.size() && static_cast<signed char>(text[plain]) >= 0 &&
           static_cast<signed char>(text[plain + 1]) >= 0 &&
           plain_[static_cast<unsigned char>(text[plain])]) {
      ++plain;
    }
    out.append(text.substr(0, plain));
    text.remove_prefix(plain);
    const std::string_view cluster = text.substr(0, cluster_length(text));
    text.remove_prefix(cluster.size());
    if (cluster.size() <= kMaxCluster && find_shortest(cluster, replacement) != 0) {
      out += replacement;
      continue;
    }
    size_t length;
    for (size_t at = 0; at < cluster.size(); at += length) {
      decode_utf8(cluster.data() + at, length);
      const std::string_view character = cluster.substr(at, length);
      out += find_shortest(character, replacement) != 0 ? replacement : character;
    }
  }
}

}  // namespace megatron
