// A model whose sequences bring an input and own a state of fixed size next to their blocks, in the
// place of recurrent models, encoders with decoders, and models with images.
#pragma once

#include <memory>

#include "megatron/models/model.h"

namespace megatron {

// Two layers: x + W_out (s + c) with s_t = s_{t-1} / 2 + W_in x_t and c what the sequence's input
// gives, and attention with an MLP. fp64.
std::unique_ptr<Model> make_toy_model(const ParallelGroups& groups);

// Logits of a whole sequence without a cache: its given rows [m, h], then ids. [m + ids, v]
at::Tensor toy_logits(Model& model, const SequenceInput& input, const at::Tensor& rows,
                      const std::vector<int32_t>& ids);

}  // namespace megatron
