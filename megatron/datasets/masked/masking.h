// Which tokens of a sample are masked, and by what they are replaced: whole words in n-grams of up
// to `max_ngram` words, until a share of the tokens is masked. Element for element Megatron-LM's
// create_masked_lm_predictions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megatron/base/json_writer.h"
#include "megatron/datasets/detail/numpy_random.h"
#include "megatron/datasets/masked/masked_tokens.h"

namespace megatron {

struct MaskingOptions {
  double probability = 0.15;  // share of the tokens that are masked
  int64_t max_ngram = 3;      // words
  bool whole_word = true;
  bool longer_ngrams = false;  // prefer longer ones; default: shorter ones
  bool geometric = false;      // lengths of n-grams follow a geometric distribution, p = 0.2
  // Shares of masked tokens that become the mask, a random token, and stay as they are
  double masks = 0.8, random = 0.1, kept = 0.1;
};

// Tokens that are masked at most in a sample whose target length is at most `target`; at least 1.
int64_t most_masked(const MaskingOptions& options, int64_t target);

// The masked tokens of a sample in the order in which they were drawn, in spans of n-grams.
struct MaskedPositions {
  std::vector<int64_t> positions;
  std::vector<int64_t> originals;
  std::vector<size_t> ends;  // by span: end in `positions`
};

class Masking {
 public:
  // Throws Error if `tokens` has no mask although replacements are drawn.
  Masking(const MaskingOptions& options, const MaskedTokens& tokens);

  // Masks `ids`, whose target length is `target`: positions are drawn and replacements written.
  // [CLS] and [SEP] are never masked.
  void mask(std::span<int64_t> ids, int64_t target, NumpyRandom& random,
            MaskedPositions& out) const;
  // The same without replacements: draws positions only.
  void draw_positions(std::span<const int64_t> ids, int64_t target, NumpyRandom& random,
                      MaskedPositions& out) const;

 private:
  template <class Replace>
  void draw(std::span<const int64_t> ids, int64_t target, NumpyRandom& random, MaskedPositions& out,
            Replace replace) const;
  // Positions of candidates, the words that may be masked, one after the other; `ends`: where each
  // ends.
  void find_words(std::span<const int64_t> ids, std::vector<int64_t>& positions,
                  std::vector<size_t>& ends) const;
  int64_t replacement(int64_t original, NumpyRandom& random) const;

  const MaskingOptions options_;
  const MaskedTokens& tokens_;      // must outlive this
  std::vector<double> ngram_sums_;  // cumulative probabilities of 1, 2, ... words
};

// The seed of the generator of sample `index`.
inline uint32_t sample_seed(int64_t seed, int64_t index) {
  return static_cast<uint32_t>(static_cast<uint64_t>(seed) + static_cast<uint64_t>(index));
}

// Members of the description of a masked dataset: what its samples depend on besides sentences.
void describe_masking(const MaskingOptions& options, const MaskedTokens& tokens, JsonWriter& json);

}  // namespace megatron
