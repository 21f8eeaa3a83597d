// WordLevel and WordPiece. WordPiece takes the longest token that a word starts with, then the
// longest that the rest starts with, and so on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "megatron/tokenizers/detail/text/double_array.h"
#include "megatron/tokenizers/detail/word_cache.h"

namespace megatron {

// Source: `tokenizers` models/wordpiece. Thread safe.
class WordPieceModel : public WordModel {
 public:
  // `tokens` by id; those that continue a word start with `prefix`. Words of more than
  // `max_characters`, and words with a part that is no token, are `unknown`.
  WordPieceModel(const std::vector<std::string>& tokens, std::string_view prefix, int32_t unknown,
                 size_t max_characters);
  void encode_word(std::string_view word, ModelScratch& scratch,
                   std::vector<int32_t>& out) const override;

 private:
  DoubleArray first_, following_;
  int32_t unknown_;
  size_t max_characters_;
};

// Thread safe.
class WordLevelModel : public WordModel {
 public:
  // `unknown` -1: words outside the vocabulary throw Error.
  WordLevelModel(const std::vector<std::string>& tokens, int32_t unknown);
  void encode_word(std::string_view word, ModelScratch& scratch,
                   std::vector<int32_t>& out) const override;

 private:
  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, int32_t> ids_;
  int32_t unknown_;
};

}  // namespace megatron
