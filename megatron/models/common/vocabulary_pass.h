// The loss of a model whose vocabulary is split over the pipeline stages.
#pragma once

#include "megatron/models/model.h"

namespace megatron {

// Of one micro-batch, on the rank that holds part ranks.rank() of the vocabulary; `model` gives the
// logits of that part. Arguments as for Model::begin_loss().
std::unique_ptr<VocabularyPass> split_vocabulary_pass(Model& model, const ProcessGroup& ranks,
                                                      const at::Tensor& hidden,
                                                      const at::Tensor& labels,
                                                      const at::Tensor& loss_mask);

}  // namespace megatron
