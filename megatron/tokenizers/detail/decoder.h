// Converts tokens back to text, by the steps of a tokenizer.json's decoder.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/tokenizers/detail/text/regex.h"

namespace megatron {

struct DecoderStep {
  enum class Kind {
    kByteLevel,
    kMetaspace,
    kWordPiece,
    kBpe,
    kByteFallback,
    kFuse,
    kStrip,
    kReplaceString,
    kReplaceRegex,
  };
  Kind kind = Kind::kByteLevel;
  std::string pattern;         // of the two kReplace; the mark of kMetaspace; prefix of kWordPiece;
                               // suffix of kBpe; character of kStrip
  std::string content;         // of the two kReplace
  bool cleanup = false;        // kWordPiece: removes spaces around punctuation
  bool drop_first = false;     // kMetaspace: drops marks of the first token
  size_t start = 0, stop = 0;  // kStrip
  std::string where;
};

// Thread safe.
class Decoder {
 public:
  explicit Decoder(std::vector<DecoderStep> steps);

  const std::vector<DecoderStep>& steps() const { return steps_; }

  // The text of tokens, given their spellings in the vocabulary. Without steps they are joined by
  // spaces.
  std::string decode(std::vector<std::string> tokens) const;

  // The bytes of one token in the middle of a text, which may be a part of a UTF-8 sequence.
  std::string piece(std::string_view token) const;

 private:
  std::vector<DecoderStep> steps_;
  std::vector<std::unique_ptr<Regex>> regexes_;  // by step
};

// The byte that "<0x4A>" spells, -1 for other tokens.
int parse_byte_token(std::string_view token);
// "<0x4A>".
std::string byte_token(int byte);

}  // namespace megatron
