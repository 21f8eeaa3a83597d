// The datasets of a run that trains BERT or T5, from flags.
#pragma once

#include "megatron/datasets/dataset_builder.h"
#include "megatron/datasets/masked/masked_data_config.h"

namespace megatron {

// Needs request.text_tokenizer. Splits divide documents, not sequences. Throws UsageError where T5
// has no --decoder-seq-length.
TrainValidTestDatasets build_masked_datasets(MaskedKind kind, const DataConfig& data,
                                             const MaskedDataConfig& masked,
                                             const DatasetRequest& request);

}  // namespace megatron
