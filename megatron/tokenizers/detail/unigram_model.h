// Unigram: the segmentation of text into pieces with the greatest sum of scores (Viterbi).
//
// Text is segmented word by word (metaspace_cutter.h) and words are cached, although the reference
// implementations sum scores from the start of the text, so that their rounding can decide between
// almost equally good segmentations. Therefore the running sum is computed exactly as in the
// reference, and a cached segmentation is used only where rounding cannot change it; see Note
// [Margins].
//
// Source: Kudo 2018 (arXiv:1804.10959); EncodeOptimized of SentencePiece and of `tokenizers`.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/tokenizers/detail/metaspace_cutter.h"
#include "megatron/tokenizers/detail/text/double_array.h"
#include "megatron/tokenizers/detail/word_cache.h"

namespace megatron {

struct UnigramData {
  std::vector<std::string> tokens;  // by id; empty: matches no text
  std::vector<double> scores;       // by id
  int32_t unknown = -1;             // id of characters that are in no piece
  double unknown_score = 0;
  bool byte_fallback = false;
  std::array<int32_t, 256> byte_ids{};  // ids of <0x00> to <0xFF>; -1: none
  // Sums are rounded to float and restarted beyond +-100,000, as in SentencePiece; else they are
  // double, as in the `tokenizers` package.
  bool sentencepiece = false;
};

// Thread safe except for the cache and the scratch memory.
class UnigramModel {
 public:
  explicit UnigramModel(UnigramData data);

  const UnigramData& data() const { return data_; }

  // Appends the ids of `text`, which is not empty and well-formed UTF-8.
  // Throws Error for an unknown character if there is no id for it.
  void encode(std::string_view text, WordCache& cache, ModelScratch& scratch,
              std::vector<int32_t>& out) const;

 private:
  double add(double sum, double score) const {
    const double result = sum + score;
    return data_.sentencepiece ? static_cast<double>(static_cast<float>(result)) : result;
  }
  // Segments one word after text with score `sum`, which it advances. Appends its ids. Returns the
  // margin; -1: the segmentation must not be cached.
  double divide(std::string_view word, double& sum, ModelScratch& scratch,
                std::vector<int32_t>& out) const;
  void append_unknown(std::string_view text, std::vector<int32_t>& out) const;

  UnigramData data_;
  DoubleArray trie_;
  MetaspaceCutter cutter_;
};

}  // namespace megatron
