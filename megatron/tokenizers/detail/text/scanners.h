// Hand-written scanners that split text like the pre-tokenizer regular expressions of well-known
// models.
//
//   GPT-2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   Llama 3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}
//            | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   Qwen 2   Llama 3's with \p{N} for \p{N}{1,3}
//   Megatron's v1 for tiktoken    Qwen 2's without contractions
//   Megatron's v2 for tiktoken, with U for [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] and
//            L for [\p{Ll}\p{Lm}\p{Lo}\p{M}]
//            [^\r\n\p{L}\p{N}]?U*L+|[^\r\n\p{L}\p{N}]?U+L*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*
//            |\s*[\r\n]+|\s+(?!\S)|\s+
//   o200k    v2 with \p{N}{1,3} for \p{N} and a contraction of Llama 3 after words
//
// Each scanner takes well-formed UTF-8 and calls emit(begin, end) for consecutive pieces that cover
// it. Linear time.
#pragma once

#include "megatron/tokenizers/detail/text/unicode.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {

class Scanner {
 public:
  Scanner(const char* begin, const char* end) : p_(begin), end_(end), classes_(unicode_classes()) {}

  template <class Emit>
  void gpt2(Emit&& emit) {
    while (p_ < end_) {
      const char* start = p_;
      size_t length;
      uint8_t kind = class_at(p_, length);
      if (*p_ == '\'' && (length = gpt2_contraction()) != 0) {
        p_ += length;
        emit(start, p_);
        continue;
      }
      if (*p_ == ' ' && p_ + 1 < end_) {  // a space belongs to what follows it
        const uint8_t next = class_at(p_ + 1, length);
        if (next < kSpace) {
          kind = next;
          ++p_;
        }
      }
      if (kind < kSpace) {
        skip(kind);
      } else {
        p_ = space_run(false);
      }
      emit(start, p_);
    }
  }

  // kMaxDigits: 3 for Llama 3, 1 for Qwen 2. kContractions: false for Megatron's v1.
  template <int kMaxDigits, bool kContractions, class Emit>
  void llama3(Emit&& emit) {
    while (p_ < end_) {
      const char* start = p_;
      size_t length;
      const uint8_t kind = class_at(p_, length);
      if (kind == kLetter) {
        skip(kLetter);
      } else if (kind == kNumber) {
        digits<kMaxDigits>(length);
      } else if (kind == kNewline) {
        p_ = space_run(true);
      } else if (size_t contraction;
                 kContractions && *p_ == '\'' && (contraction = llama3_contraction()) != 0) {
        p_ += contraction;
      } else {
        llama3_prefixed(kind, length);
      }
      emit(start, p_);
    }
  }

  // Words are also split before upper case. kMaxDigits: 1 for Megatron's v2, 3 for o200k, whose
  // words also have kContractions.
  template <int kMaxDigits, bool kContractions, class Emit>
  void camel_case(Emit&& emit) {
    while (p_ < end_) {
      const char* start = p_;
      size_t length;
      const uint8_t kind = class_at(p_, length);
      bool word = true;
      if (kind == kLetter) {
        bool ignored;
        p_ = cased_word(p_, ignored);
      } else if (kind == kNumber || kind == kNewline) {
        word = false;
        kind == kNumber ? digits<kMaxDigits>(length) : void(p_ = space_run(true));
      } else {
        word = camel_case_prefixed(kind, length);
      }
      if (kContractions && word && p_ < end_ && *p_ == '\'') p_ += llama3_contraction();
      emit(start, p_);
    }
  }

 private:
  // A piece that starts with white space, a symbol or a mark of `length` bytes, optionally followed
  // by a word. False: no word follows, and it is not a word itself.
  bool camel_case_prefixed(uint8_t kind, size_t length) {
    const char* const next = p_ + length;
    bool has_lower;
    const char* const end = cased_word(next, has_lower);
    size_t ignored;
    // A mark counts as a word by U*L+ before it counts as the prefix of a word that is U+L* only.
    const bool mark = kind == kOther && case_at(p_, ignored) != 0;
    if (end > next && (has_lower || !mark)) {
      p_ = end;
      return true;
    }
    if (mark) {
      p_ = next;
      return true;
    }
    if (kind == kOther || (*p_ == ' ' && next < end_ && class_at(next, ignored) == kOther)) {
      p_ = next;
      skip(kOther);
      while (p_ < end_ && (*p_ == '\r' || *p_ == '\n' || *p_ == '/')) ++p_;
    } else {
      p_ = space_run(true);
    }
    return false;
  }

  // The end of U*L+ at p, else that of U+; p if there is neither.
  const char* cased_word(const char* p, bool& has_lower) const {
    const char* behind_uncased = nullptr;
    uint8_t kind = 0;
    size_t length;
    for (; p < end_ && ((kind = case_at(p, length)) & kUpperOrUncased) != 0; p += length)
      if ((kind & kLowerOrUncased) != 0) behind_uncased = p + length;
    has_lower = p < end_ && (kind & kLowerOrUncased) != 0;
    if (has_lower) {
      do {
        p += length;
      } while (p < end_ && (case_at(p, length) & kLowerOrUncased) != 0);
      return p;
    }
    has_lower = behind_uncased != nullptr;
    return has_lower ? behind_uncased : p;
  }

  uint8_t case_at(const char* p, size_t& length) const {
    length = 1;
    if (static_cast<unsigned char>(*p) >= 128) {
      return classes_[decode_utf8(p, length)] & (kUpperOrUncased | kLowerOrUncased);
    }
    if (kByteClass[static_cast<unsigned char>(*p)] != kLetter) return 0;
    return (*p & 0x20) != 0 ? kLowerOrUncased : kUpperOrUncased;
  }

  template <int kMaxDigits>
  void digits(size_t length) {
    int count = 0;
    do {
      p_ += length;
    } while (++count < kMaxDigits && p_ < end_ && class_at(p_, length) == kNumber);
  }

  // A piece that starts with white space or a symbol of `length` bytes, optionally followed by
  // letters.
  void llama3_prefixed(uint8_t kind, size_t length) {
    const char* next = p_ + length;
    size_t next_length;
    const uint8_t next_kind = next < end_ ? class_at(next, next_length) : uint8_t{kAboveAscii};
    if (next_kind == kLetter) {
      p_ = next;
      skip(kLetter);
    } else if (kind == kOther || (*p_ == ' ' && next_kind == kOther)) {
      p_ = next;
      skip(kOther);
      while (p_ < end_ && (*p_ == '\r' || *p_ == '\n')) ++p_;
    } else {
      p_ = space_run(true);
    }
  }

  uint8_t class_at(const char* p, size_t& length) const {
    const uint8_t kind = kByteClass[static_cast<unsigned char>(*p)];
    length = 1;
    if (kind != kAboveAscii) return kind;
    return classes_[decode_utf8(p, length)] & 7;
  }

  // Skips characters of one class.
  void skip(uint8_t kind) {
    while (p_ < end_) {
      const uint8_t here = kByteClass[static_cast<unsigned char>(*p_)];
      if (here == kind) {
        ++p_;
        continue;
      }
      if (here != kAboveAscii) return;
      size_t length;
      if ((classes_[decode_utf8(p_, length)] & 7) != kind) return;
      p_ += length;
    }
  }

  // The end of the piece of white space at p_: `\s*[\r\n]+` if asked for, else `\s+(?!\S)`, else
  // `\s+`.
  const char* space_run(bool newline_first) const {
    const char* p = p_;
    const char* after_newline = nullptr;
    const char* last = p_;
    while (p < end_) {
      size_t length;
      const uint8_t kind = class_at(p, length);
      if (kind != kSpace && kind != kNewline) break;
      last = p;
      p += length;
      if (kind == kNewline) after_newline = p;
    }
    if (newline_first && after_newline != nullptr) return after_newline;
    return p == end_ || last == p_ ? p : last;
  }

  size_t gpt2_contraction() const {
    const size_t left = static_cast<size_t>(end_ - p_);
    if (left < 2) return 0;
    const char a = p_[1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (left < 3) return 0;
    const char b = p_[2];
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
  }

  // The same, case-insensitively; U+017F folds to s.
  size_t llama3_contraction() const {
    const size_t left = static_cast<size_t>(end_ - p_);
    if (left < 2) return 0;
    const int a = p_[1] | 0x20;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (left < 3) return 0;
    if (p_[1] == '\xc5' && p_[2] == '\xbf') return 3;
    const int b = p_[2] | 0x20;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
  }

  const char* p_;
  const char* end_;
  const uint8_t* classes_;
};

}  // namespace megatron
