// Splits text into the pieces that models encode, by the steps of a tokenizer.json's pre_tokenizer.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/tokenizers/detail/text/regex.h"
#include "megatron/tokenizers/detail/text/scanners.h"

namespace megatron {

// The regular expressions for which there is a scanner.
enum class KnownPattern { kNone, kGpt2, kLlama3, kQwen2, kTiktokenV1, kTiktokenV2, kO200k };
std::string_view pattern_text(KnownPattern pattern);
KnownPattern find_known_pattern(std::string_view regex);

// Calls emit(begin, end) for each piece. Not for kNone.
template <class Emit>
void scan(KnownPattern pattern, const char* begin, const char* end, Emit&& emit) {
  Scanner scanner(begin, end);
  switch (pattern) {
    case KnownPattern::kGpt2:
      return scanner.gpt2(emit);
    case KnownPattern::kLlama3:
      return scanner.llama3<3, true>(emit);
    case KnownPattern::kQwen2:
      return scanner.llama3<1, true>(emit);
    case KnownPattern::kTiktokenV1:
      return scanner.llama3<1, false>(emit);
    case KnownPattern::kTiktokenV2:
      return scanner.camel_case<1, false>(emit);
    case KnownPattern::kO200k:
      return scanner.camel_case<3, true>(emit);
    case KnownPattern::kNone:
      break;
  }
}

// What happens to the delimiters that Split matches.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct PreTokenizerStep {
  enum class Kind {
    kSplitRegex,
    kSplitString,
    kDigits,
    kPrefixSpace,
    kByteLevel,   // converts pieces to GPT-2's printable spelling of bytes
    kMetaspace,   // writes `pattern` for spaces and, per `prepend`, in front; splits before it
    kWords,       // \\w+|[^\\w\\s]+
    kWhitespace,  // the delimiters are white space
    kPunctuation,
  };
  enum class Prepend { kNever, kAlways, kFirst };
  Kind kind = Kind::kSplitRegex;
  std::string pattern;  // of the two kSplit and of kMetaspace
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;                // of the two kSplit: the gaps are the delimiters
  Prepend prepend = Prepend::kNever;  // of kMetaspace
  bool split = true;                  // of kMetaspace
};

// Thread safe.
class PreTokenizer {
 public:
  struct Scratch {
    struct Piece {
      size_t begin, end;
      bool matched;
    };
    std::vector<Piece> pieces, next;
    std::string text, next_text;
  };

  // `where`: file and key, for messages.
  PreTokenizer(std::vector<PreTokenizerStep> steps, std::string_view where);

  const std::vector<PreTokenizerStep>& steps() const { return steps_; }

  // Calls emit(begin, end) for each piece of well-formed `text`. The pointers point into `text` or
  // `scratch`. `first`: `text` is the start of the input.
  template <class Emit>
  void split(std::string_view text, bool first, Scratch& scratch, Emit&& emit) const {
    const char* begin = text.data();
    const char* end = begin + text.size();
    if (text.empty()) return;
    if (steps_.empty()) return emit(begin, end);
    if (scanner_ != KnownPattern::kNone) return scan(scanner_, begin, end, emit);
    const char* base = split_by_steps(text, first, scratch);
    for (const Scratch::Piece& piece : scratch.pieces) emit(base + piece.begin, base + piece.end);
  }

 private:
  // Leaves the pieces in scratch.pieces; returns the text that they point into.
  const char* split_by_steps(std::string_view text, bool first, Scratch& scratch) const;

  std::vector<PreTokenizerStep> steps_;
  std::vector<KnownPattern> known_;               // by step
  std::vector<std::unique_ptr<Regex>> compiled_;  // by step; null if no expression is needed
  KnownPattern scanner_ = KnownPattern::kNone;    // if the only step is a known pattern
};

}  // namespace megatron
