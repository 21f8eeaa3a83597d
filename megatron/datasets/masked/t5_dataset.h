// Samples of T5: sentences whose masked spans are replaced by sentinels for the encoder, and the
// spans, each behind its sentinel, for the decoder. Element for element those of Megatron-LM's
// T5MaskedWordPieceDataset.
#pragma once

#include <memory>
#include <string>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/masked/masking.h"
#include "megatron/datasets/masked/sentence_source.h"

namespace megatron {

// Tokens of the shortest encoder: texts are cut to two less, and have two or more.
constexpr int64_t kT5MinSequenceLength = 4;

struct T5DatasetConfig {
  int64_t sequence_length = 0;  // of the encoder
  int64_t decoder_sequence_length = 0;
  MaskingOptions masking;
  SentenceSourceOptions sentences;  // of the same seed and vocabulary
};

SentenceSourceOptions t5_sentences(int64_t sequence_length, SentenceSourceOptions options);

// int64 unless said otherwise; [s_e] of the encoder, [s_d] of the decoder:
//   text_enc   [s_e] text with sentinels; 0 behind it
//   text_dec   [s_d] the decoder's start, then sentinels and what they stand for; 0 behind it
//   labels     [s_d] the next token, at last the end; -1 behind it
//   loss_mask  [s_d] float32, 1 over the decoder's text
//   enc_mask, dec_mask  [s_e], [s_d] uint8, 1 where there is text other than the padding token (the
//              decoder's start is text, also where it is the padding token)
//   truncated  [1] the text was cut
Columns t5_columns(int64_t sequence_length, int64_t decoder_sequence_length);

// What any sample of this length may need, of its sentinels and of its decoder's positions.
struct T5Needs {
  int64_t sentinels = 0, decoder_positions = 0;
};
T5Needs t5_needs(int64_t sequence_length, double mask_probability);
// A warning with the numbers if a sample might need more than there is; empty: none can.
std::string t5_warning(const T5DatasetConfig& config, const MaskedTokens& tokens);

class T5Dataset : public Dataset {
 public:
  // `tokens` must have sentinels, a start and an end: else an Error names what is missing.
  T5Dataset(std::unique_ptr<const SentenceSource> sentences,
            std::shared_ptr<const MaskedTokens> tokens, const T5DatasetConfig& config);

  int64_t size() const override { return sentences_->size(); }
  // Throws Error for a sample with more spans than sentinels, or more text than the decoder has
  // positions.
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  struct Texts;  // of the encoder and the decoder
  Texts split_at_spans(int64_t index, std::span<const int64_t> ids,
                       const MaskedPositions& masked) const;

  std::unique_ptr<const SentenceSource> sentences_;
  std::shared_ptr<const MaskedTokens> tokens_;
  T5DatasetConfig config_;
  Masking masking_;
};

}  // namespace megatron
