// The compiled replacement rules of SentencePiece ("precompiled_charsmap"): a trie of byte strings
// and the replacement of each.
//
//   uint32 size of the trie in bytes; the trie, uint32 units of a double array as Darts-clone
//   writes it; the replacements, each ended by a zero byte. All little-endian.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// Thread safe.
class Charsmap {
 public:
  Charsmap() = default;
  // Throws Error, prefixed with `where`, if the sizes are inconsistent. Units that point outside
  // end a search.
  Charsmap(std::string_view blob, std::string_view where);

  bool empty() const { return units_.empty(); }

  // The length of the shortest or longest rule that `text` starts with, 0 if there is none.
  size_t find_shortest(std::string_view text, std::string_view& replacement) const {
    return find(text, true, replacement);
  }
  size_t find_longest(std::string_view text, std::string_view& replacement) const {
    return find(text, false, replacement);
  }
  // Whether no rule starts with ASCII character `c` followed by another one.
  bool is_plain(unsigned char c) const { return plain_[c]; }

  // Appends `text` normalised like the `tokenizers` package's Precompiled normalizer: grapheme
  // clusters of up to 5 bytes are replaced as a whole by the replacement of their shortest rule;
  // longer ones character by character.
  void append_by_clusters(std::string_view text, std::string& out) const;

 private:
  size_t find(std::string_view text, bool shortest, std::string_view& replacement) const;

  std::vector<uint32_t> units_;
  std::string replacements_;
  std::array<bool, 128> plain_{};
};

}  // namespace megatron
