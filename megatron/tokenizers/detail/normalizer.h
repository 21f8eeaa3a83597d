// What a tokenizer.json's normalizer does to text before it is cut, step by step.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/tokenizers/detail/charsmap.h"
#include "megatron/tokenizers/detail/regex.h"
#include "megatron/tokenizers/detail/unicode_normalization.h"

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
  std::string pattern;  // of the two kReplace
  std::string content;  // what replaces it; what kPrepend puts in front; the blob of kCharsmap
  bool left = false, right = false;                                                // of kStrip
  bool clean_text = false, chinese = false, strip_accents = false, lower = false;  // of kBert
  std::string where;  // file and key, for messages
};

// Thread safe but for the scratch memory.
class Normalizer {
 public:
  struct Scratch {
    std::string a, b;
  };

  // Throws Error for a pattern or a charsmap that cannot be used.
  explicit Normalizer(std::vector<NormalizerStep> steps);

  bool empty() const { return steps_.empty(); }
  const std::vector<NormalizerStep>& steps() const { return steps_; }

  // Well-formed `text` after all steps: `text` itself when nothing changes, else a view of
  // `scratch`.
  std::string_view apply(std::string_view text, Scratch& scratch) const;

 private:
  std::vector<NormalizerStep> steps_;
  std::vector<std::unique_ptr<Regex>> regexes_;       // by step
  std::vector<std::unique_ptr<Charsmap>> charsmaps_;  // by step
};

// Appends `text` with every occurrence of a pattern replaced; used by normalizers and decoders.
void append_replaced(std::string_view text, std::string_view pattern, std::string_view content,
                     std::string& out);
void append_replaced(std::string_view text, const Regex& regex, std::string_view content,
                     std::string& out);

}  // namespace megatron
