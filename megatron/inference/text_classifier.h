// Logits of classes of texts, or scores of choices, by an encoder with a head for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "megatron/datasets/tuning/labelled_texts.h"
#include "megatron/models/model.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct ClassifyOptions {
  int64_t max_length = 0;       // tokens of a text or a pair, which loses its end
  int64_t batch_tokens = 8192;  // of a forward, with padding
};

// [texts, classes] fp32 on the CPU; one class: a number; choices: a score. Throws Error for a model
// that is no encoder or has no such head, for more positions than it has, and as encode_pair().
at::Tensor classify_texts(Model& model, const Tokenizer& tokenizer,
                          std::span<const LabelledText> texts, const ClassifyOptions& options);

}  // namespace megatron
