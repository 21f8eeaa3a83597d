// Samples of BERT: two runs of sentences of one document, in their order or swapped, some of their
// tokens masked. Element for element those of Megatron-LM's BERTMaskedWordPieceDataset.
#pragma once

#include <memory>
#include <string>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/masked/masking.h"
#include "megatron/datasets/masked/sentence_source.h"

namespace megatron {

struct BertDatasetConfig {
  int64_t sequence_length = 0;
  bool binary_head = true;  // false: one run of sentences, nothing is swapped
  MaskingOptions masking;
  SentenceSourceOptions sentences;  // of the same seed and vocabulary
};

// What the sentences of samples of this length need: room for [CLS] and two [SEP], and two
// sentences where one may be swapped with the other.
SentenceSourceOptions bert_sentences(int64_t sequence_length, bool binary_head,
                                     SentenceSourceOptions options);

// [s] each, behind the text 0 unless said otherwise:
//   text          int64, [CLS] A [SEP] B [SEP] with masked tokens; behind it the padding token
//   types         int64, 0 up to the first [SEP], 1 from B on
//   labels        int64, the original token where one is masked, else -1
//   loss_mask     float32, 1 where a token is masked, also where it was left as it is
//   padding_mask  uint8, 1 where there is text other than the padding token
// [1] each, int64 unless said otherwise: is_random (B comes from before A), truncated (A and B were
// cut), sample_weight (float32, 1)
// `most_masked`: as most_masked_by_bert() says.
Columns bert_columns(int64_t sequence_length, int64_t most_masked);

// Tokens of a sample that are masked at most.
int64_t most_masked_by_bert(const MaskingOptions& masking, int64_t sequence_length);

// Throws Error that names what is missing if there is no [CLS], [SEP] or mask.
void check_bert_tokens(const MaskedTokens& tokens);

// labels -1 and loss_mask 0, but the original token and 1 where one is masked.
void write_labels(const MaskedPositions& masked, std::span<int64_t> labels,
                  std::span<float> loss_mask);

class BertDataset : public Dataset {
 public:
  // `tokens` must have [CLS], [SEP] and a mask: else an Error names what is missing.
  BertDataset(std::unique_ptr<const SentenceSource> sentences,
              std::shared_ptr<const MaskedTokens> tokens, const BertDatasetConfig& config);

  int64_t size() const override { return sentences_->size(); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  struct Pair;  // the tokens of A and of B
  Pair pair_of(const SentenceRun& run, NumpyRandom& random) const;

  std::unique_ptr<const SentenceSource> sentences_;
  std::shared_ptr<const MaskedTokens> tokens_;
  BertDatasetConfig config_;
  Masking masking_;
};

}  // namespace megatron
