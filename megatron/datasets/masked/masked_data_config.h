// The flags of masked samples, of BERT and T5.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/datasets/masked/masking.h"

namespace megatron {

enum class MaskedKind { kBert, kT5 };
enum class MaskingGeometric { kAuto, kTrue, kFalse };
// Samples of BERT: sentences of one document, or text of several that fills them
enum class BertData { kSentences, kPacked };

struct MaskedDataConfig : Config {
  BertData bert_data = BertData::kSentences;
  double mask_prob = 0.15;
  double short_seq_prob = 0.1;
  std::optional<int64_t> masking_max_ngram;  // none: 3 for BERT, 10 for T5
  bool masking_whole_word = true;
  bool masking_longer_ngrams = false;
  MaskingGeometric masking_geometric = MaskingGeometric::kAuto;
  std::vector<double> mlm_replace = {0.8, 0.1, 0.1};
  std::vector<int64_t> mock_lengths;  // [least, most]; empty: of all kinds

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  MaskingOptions masking(MaskedKind kind) const;
};

}  // namespace megatron
