// The datasets of a run that trains BERT or T5, from flags.
#pragma once

#include "megatron/datasets/dataset_builder.h"
#include "megatron/datasets/masked/masked_data_config.h"

namespace megatron {

struct MaskedModel {
  MaskedKind kind = MaskedKind::kBert;
  bool binary_head = true;         // of BERT
  int64_t decoder_seq_length = 0;  // of T5
};

// Needs request.text_tokenizer. Splits divide documents, not sequences.
TrainValidTestDatasets build_masked_datasets(const MaskedModel& model, const DataConfig& data,
                                             const MaskedDataConfig& masked,
                                             const DatasetRequest& request);

}  // namespace megatron
