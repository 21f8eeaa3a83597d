// Splits text before U+2581, the mark for a space, wherever no token can span the split. Then each
// part is encoded separately, and a cache of words can be used.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_set>

#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {

inline constexpr std::string_view kMetaspace = "\xe2\x96\x81";
inline constexpr uint32_t kMetaspaceCharacter = 0x2581;

class MetaspaceCutter {
 public:
  // Text is not split until enable().
  void enable() { enabled_ = true; }
  void disable() { enabled_ = false; }
  bool enabled() const { return enabled_; }
  // Some token or merge joins `character` with a following mark.
  void add_joined(uint32_t character) {
    if (character < ascii_.size()) ascii_[character] = true;
    joined_.insert(character);
  }
  // Registers every character that precedes a mark in `token`.
  void add_token(std::string_view token) {
    for (size_t at = 1; (at = token.find(kMetaspace, at)) != token.npos; ++at) {
      size_t length;
      add_joined(decode_utf8(previous_utf8(token.data() + at), length));
    }
  }

  // Calls emit(begin, end) for parts that cover `text`, which is not empty.
  template <class Emit>
  void split(std::string_view text, Emit&& emit) const {
    const char* begin = text.data();
    const char* const end = begin + text.size();
    if (enabled_) {
      for (size_t at = 1; (at = text.find(kMetaspace, at)) != text.npos; at += kMetaspace.size()) {
        const char* p = text.data() + at;
        if (is_joined(p)) continue;
        emit(begin, p);
        begin = p;
      }
    }
    emit(begin, end);
  }

 private:
  bool is_joined(const char* p) const {
    const auto byte = static_cast<unsigned char>(p[-1]);
    if (byte < ascii_.size()) return ascii_[byte];
    if (joined_.empty()) return false;
    size_t length;
    return joined_.contains(decode_utf8(previous_utf8(p), length));
  }

  bool enabled_ = false;
  std::array<bool, 128> ascii_{};
  std::unordered_set<uint32_t> joined_;
};

}  // namespace megatron
