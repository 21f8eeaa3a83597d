// Masked samples of packed text, as ModernBERT is trained on: no padding, several documents in a
// sample, each of which sees itself alone.
#pragma once

#include <memory>
#include <string>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/masked/masking.h"
#include "megatron/datasets/masked/packed_text.h"

namespace megatron {

// [s] each:
//   text          int64, the tokens of documents, some of them masked
//   labels        int64, the original token where one is masked, else -1
//   loss_mask     float32, 1 where a token is masked, also where it was left as it is
//   position_ids  int64, from 0 in each document, or in what is left of one that began elsewhere
// and the beginnings of the documents. The target length of masking is s.
Columns packed_columns(int64_t sequence_length, int64_t most_masked);

class PackedDataset : public Dataset {
 public:
  // `tokens` as BertDataset's. Sample i is masked by the generator sample_seed(seed, i).
  PackedDataset(std::unique_ptr<const PackedText> text, std::shared_ptr<const MaskedTokens> tokens,
                const MaskingOptions& masking, const PackedTextOptions& options);

  int64_t size() const override { return text_->size(); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  const std::unique_ptr<const PackedText> text_;
  const std::shared_ptr<const MaskedTokens> tokens_;
  const MaskingOptions options_;
  const Masking masking_;
  const int64_t seed_;
};

}  // namespace megatron
