// The normalizer of a tokenizer.json, which transforms text before it is split, step by step.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/tokenizers/detail/text/charsmap.h"
#include "megatron/tokenizers/detail/text/regex.h"
#include "megatron/tokenizers/detail/text/unicode_normalization.h"

namespace megatron {

struct NormalizerStep {
  enum class Kind {
    kNormalForm,
    kLowercase,
    kStripAccents,
    kStrip,
    kReplaceString,
    kReplaceRegex,
    kPrepend,
    kCharsmap,
    kBert,
    kNmt,
    kByteLevel,
  };
  Kind kind = Kind::kNormalForm;
  NormalForm form = NormalForm::kNfc;
  std::string pattern;               // of the two kReplace
  std::string content;               // replacement; prefix of kPrepend; blob of kCharsmap
  bool left = false, right = false;  // kStrip
  bool clean_text = false, chinese = false, strip_accents = false, lower = false;  // of kBert
  std::string where;  // file and key, for messages
};

// Thread safe except for the scratch memory.
class Normalizer {
 public:
  struct Scratch {
    std::string a, b;
  };

  // Throws Error for an invalid pattern or charsmap.
  explicit Normalizer(std::vector<NormalizerStep> steps);

  bool empty() const { return steps_.empty(); }
  const std::vector<NormalizerStep>& steps() const { return steps_; }

  // Applies all steps to well-formed `text`: returns `text` itself if nothing changes, else a view
  // of `scratch`. Throws Error if a step produces more than most_normalized_bytes().
  std::string_view apply(std::string_view text, Scratch& scratch) const;

 private:
  std::vector<NormalizerStep> steps_;
  std::vector<std::unique_ptr<Regex>> regexes_;       // by step
  std::vector<std::unique_ptr<Charsmap>> charsmaps_;  // by step
};

// The maximal length of text that a normalizer or decoder may produce from `bytes` bytes. Known
// ones stay far below: NFKC produces at most 11 bytes per byte, ByteLevel two.
constexpr size_t most_normalized_bytes(size_t bytes) { return (size_t{64} << 10) + 32 * bytes; }

// Throws the Error for a text that the step at `where` made longer than `most`.
[[noreturn]] void refuse_growth(std::string_view where, size_t most);

// Appends `text` with every occurrence of a pattern replaced; used by normalizers and decoders.
// Throws Error, prefixed with `where`, before `out` exceeds `most`.
struct GrowthLimit {
  size_t most;
  std::string_view where;
  void check(size_t bytes) const {
    if (bytes > most) refuse_growth(where, most);
  }
};
void append_replaced(std::string_view text, std::string_view pattern, std::string_view content,
                     const GrowthLimit& limit, std::string& out);
void append_replaced(std::string_view text, const Regex& regex, std::string_view content,
                     const GrowthLimit& limit, std::string& out);

}  // namespace megatron
