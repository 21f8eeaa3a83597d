// Forwards of an encoder over many texts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "megatron/datasets/tuning/labelled_texts.h"
#include "megatron/models/bert/bert_model.h"

namespace megatron {

// Throws Error for a model that is no BERT.
BertModel& encoder_of(Model& model);
// Throws Error for a model without an encoder: neither a BERT nor a T5.
void check_reads_texts(const Model& model);

struct EncodedTexts {
  std::vector<size_t> rows;  // which texts
  at::Tensor hidden;         // [s, b, h]; anything behind the end of a text
  at::Tensor lengths;        // [b] int64, on the device
  at::Tensor text;           // [b, s], 0 for padding; undefined: there is none
};

// Calls `use` with the hidden states of all texts, those of similar length together; the longest
// come first; of a T5 they are its encoder's output. `batch_tokens`: of one forward, with padding;
// a longer text is alone.
void for_each_batch(Model& model, std::span<const PairTokens> texts, int64_t batch_tokens,
                    const std::function<void(const EncodedTexts&)>& use);

}  // namespace megatron
