// Angles of rotary position embeddings (Su et al. 2021, arXiv:2104.09864; contracts f) and their
// scaling.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct RotaryTables {
  at::Tensor cos, sin;  // [s, r] or [s, b, r], fp32 (fp64); undefined: positions are not rotary
  bool interleaved = false;
};

// For the layers of one pass.
struct LayerRotary {
  RotaryTables all;
  RotaryTables local;  // of layers with a base of their own; undefined: there are none
  const RotaryTables& of(bool is_local) const { return is_local ? local : all; }
};

// Keeps a reference to the config, which must outlive it.
class RotaryEmbedding {
 public:
  explicit RotaryEmbedding(const TransformerConfig& config);

  // Angles at the positions [s] or [b, s] (int64), on their device. Computed in fp32 by the
  // operations of Megatron and Hugging Face, in this order, so that rounding agrees; in fp64 for
  // fp64 models. With longrope the largest position of a row decides which factors the row takes,
  // so a pass has to hold the last token of its sequences.
  LayerRotary tables(const at::Tensor& positions, at::ScalarType type) const;

  // Frequencies [r] of the scaled law for sequences of this length, in double.
  at::Tensor frequencies(int64_t length) const;

 private:
  // [r]; `beyond`: longrope's factors for sequences above the original length.
  at::Tensor scaled_frequencies(at::ScalarType type, at::Device device, bool beyond) const;
  double attention_factor() const;
  const TransformerConfig& config_;
};

}  // namespace megatron
