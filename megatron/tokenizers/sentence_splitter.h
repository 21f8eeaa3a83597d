// Divides text into sentences: Punkt (Kiss and Strunk 2006), with the same result as
// PunktSentenceTokenizer of NLTK 3.9.1.
#pragma once

#include <string_view>
#include <vector>

#include "megatron/tokenizers/punkt_parameters.h"

namespace megatron {

class SentenceSplitter {
 public:
  // `keep_newlines`: white space behind a sentence belongs to it, as with Megatron-LM's
  // --keep-newlines; else it belongs to none.
  SentenceSplitter(PunktParameters parameters, bool keep_newlines)
      : parameters_(std::move(parameters)), keep_newlines_(keep_newlines) {}

  // Appends the sentences of well-formed UTF-8, as parts of `text`. Each piece of 1,000,000
  // characters is divided by itself. Time is linear in the length of the text. Thread safe.
  void split(std::string_view text, std::vector<std::string_view>& out) const;

  // Characters of the pieces that texts are cut into.
  static constexpr size_t kPieceCharacters = 1'000'000;
  // Bytes of the first piece of well-formed UTF-8.
  static size_t first_piece(std::string_view text);

 private:
  void split_piece(std::string_view text, std::vector<std::string_view>& out) const;

  PunktParameters parameters_;
  bool keep_newlines_;
};

}  // namespace megatron
