// Angles of rotary position embeddings (Su et al. 2021, arXiv:2104.09864; contracts f).
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/transformer/transformer_config.h"

namespace megatron {

struct RotaryTables {
  at::Tensor cos, sin;  // [s, r] or [s, b, r], fp32 (fp64); undefined: positions are not rotary
  bool interleaved = false;
};

class RotaryEmbedding {
 public:
  explicit RotaryEmbedding(const TransformerConfig& config);

  // Angles at the positions [s] or [b, s] (int64), on their device. Computed in fp32 by the
  // operations of Megatron and Hugging Face, in this order, so that rounding agrees; in fp64 for
  // fp64 models.
  RotaryTables tables(const at::Tensor& positions, at::ScalarType type) const;

 private:
  at::Tensor inverse_frequencies(at::ScalarType type, at::Device device) const;  // [r]
  const TransformerConfig& config_;
};

}  // namespace megatron
