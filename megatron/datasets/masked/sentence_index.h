// The rows that order the samples of sentence-level data: each a run of consecutive sentences of
// one document. Pure functions: bit-equal to Megatron-LM's build_mapping and build_blocks_mapping.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace megatron {

// Documents of more than one sentence are left out if a sentence is longer than this.
inline constexpr int32_t kLongSentence = 512;

// Largest seed: the generator of the order is seeded with a 32-bit signed number and the next one.
inline constexpr int64_t kMaxSentenceSeed = std::numeric_limits<int32_t>::max() - 1;

struct SentenceIndexInputs {
  // First sentence of each document of the split, and behind them the end of the last one
  std::span<const int64_t> documents;
  std::span<const int32_t> lengths;    // tokens of all sentences of the file
  std::optional<int64_t> num_samples;  // epochs are added until there are so many; nullopt: one
  int64_t max_epochs = std::numeric_limits<int64_t>::max();
  int64_t max_length = 0;        // tokens of a sample
  double short_probability = 0;  // share of samples with a shorter target
  int64_t seed = 1234;           // 1 to kMaxSentenceSeed
  int64_t min_sentences = 1;     // of a sample
};

// Rows of `width` numbers. uint32; uint64 in files of more than 2^32 - 1 sentences.
struct SentenceRowArray {
  std::vector<uint32_t> narrow;
  std::vector<uint64_t> wide;
  bool is_wide = false;
  int64_t width = 3;

  int64_t size() const {
    return static_cast<int64_t>(is_wide ? wide.size() : narrow.size()) / width;
  }
};

// How many documents of the split give rows, and why the others do not.
struct SentenceCounts {
  int64_t documents = 0;
  int64_t with_long_sentence = 0;  // more than one sentence, one longer than kLongSentence
  int64_t too_few_sentences = 0;   // of the others
};

struct SentenceIndex {
  SentenceRowArray rows;  // first sentence, end, target length in tokens; shuffled
  SentenceCounts counts;
};

// Empty if no document gives a row. The rows are those of whole epochs, so there may be more than
// num_samples. Throws Error for a seed out of range.
SentenceIndex build_sentence_index(const SentenceIndexInputs& inputs);

// Rows of four: first sentence, end, document (from 0 in the split), number of the block in its
// epoch. The target of a document's rows is max_length less the tokens of its title, titles[i].
// At least two sentences a row, or one with `one_sentence_blocks`.
SentenceRowArray build_blocks_index(const SentenceIndexInputs& inputs,
                                    std::span<const int32_t> titles, bool one_sentence_blocks);

}  // namespace megatron
