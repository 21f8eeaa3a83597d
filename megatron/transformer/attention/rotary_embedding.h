// Cosines and sines of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), with their
// scaling to longer sequences.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

// Keeps a reference to the config, which must outlive it.
class RotaryEmbedding {
 public:
  explicit RotaryEmbedding(const TransformerConfig& config);

  // Tables for the positions [s], [b, s] or, with sections, [b, s, sections] (int64), on their
  // device. Computed in fp32 by the same operations in the same order as in Megatron and Hugging
  // Face, so that rounding agrees; in fp64 for fp64 models. With longrope the last position of a
  // sequence decides which list of factors its tokens use: `last` [s], or if undefined the largest
  // of a row, which must then be one whole sequence.
  LayerRotary tables(const at::Tensor& positions, at::ScalarType type,
                     const at::Tensor& last = {}) const;

  // Scaled frequencies [r] for sequences of this length, in double.
  at::Tensor frequencies(int64_t length) const;

 private:
  // [r]; `beyond`: use longrope's factors for sequences longer than the original length.
  at::Tensor scaled_frequencies(at::ScalarType type, at::Device device, bool beyond) const;
  double attention_factor() const;
  const TransformerConfig& config_;
  RotaryScaling scaling_;
};

}  // namespace megatron
