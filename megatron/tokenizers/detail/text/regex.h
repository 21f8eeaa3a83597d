// Regular expressions with the syntax of the `tokenizers` package (Oniguruma), on PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace megatron {

// A compiled regular expression. Thread safe.
class Regex {
 public:
  // Throws Error, prefixed with `where`, if the pattern is not supported.
  Regex(std::string_view pattern, std::string_view where);
  ~Regex();
  Regex(Regex&&) noexcept;
  // Finds the first match at or after `from`.
  bool find(std::string_view text, size_t from, size_t& begin, size_t& end) const;

  // Calls match(begin, end) for each match from left to right; after an empty match the search
  // continues after the next character.
  template <class OnMatch>
  void for_each_match(std::string_view text, OnMatch&& match) const {
    size_t from = 0, begin, end;
    while (from <= text.size() && find(text, from, begin, end)) {
      match(begin, end);
      from = end;
      if (begin == end) {
        if (end == text.size()) break;
        for (++from; from < text.size() && (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80;)
          ++from;
      }
    }
  }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
