// What masked samples need to know of a tokenizer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/datasets/dataset_description.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct MaskedTokens {
  int64_t cls = -1, sep = -1, mask = -1, pad = -1;  // -1: none
  int64_t decoder_start = -1, eos = -1;             // of a decoder's input and labels
  std::vector<int64_t> sentinels;                   // <extra_id_0>, <extra_id_1>, ...
  std::vector<int64_t> replacements;                // all ids, ascending
  std::vector<int64_t> prefix, suffix;              // around a text, as the tokenizer says
  // By id: the token continues the word before it. Where words are marked at their beginning, one
  // that follows a token of `ends_word` begins a word all the same.
  std::vector<uint8_t> continues_word, ends_word;
  int64_t vocab_size = 0;      // ids are in [0, vocab_size)
  TokenizerIdentity identity;  // compared with that of the data
};

// WordPiece marks the tokens that continue a word (`##`), others those that begin one (a space,
// spelled U+2581 or U+0120). In vocabularies with neither, each token is a word.
MaskedTokens masked_tokens(const Tokenizer& tokenizer, TokenizerIdentity identity);

// For mock data of vocabularies without the tokens that masked samples need: those that are missing
// are the lowest ids, and the sentinels the highest.
MaskedTokens mock_masked_tokens(MaskedTokens tokens);

}  // namespace megatron
