// Which models have a batch-invariant forward (tensor/batch_invariant/mode.h).
#pragma once

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

// A violation for each part of a model whose forward depends on the rows beside a row, or is not
// the one that decodes.
void validate_batch_invariant(const TransformerConfig& model, Violations& violations);

// The same on GPUs, beside those above, where `tensor_ranks` divide the model.
void validate_batch_invariant_on_gpu(const TransformerConfig& model, int64_t tensor_ranks,
                                     Violations& violations);

// Throws Error unless this process can compute so on the device, in this type.
void check_batch_invariant(const TransformerConfig& model, at::Device device, at::ScalarType dtype,
                           int64_t tensor_ranks = 1);

}  // namespace megatron
