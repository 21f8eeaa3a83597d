// Gated delta nets, the letter G of a pattern (Yang et al. 2024, arXiv:2412.06464).
#pragma once

#include <cstdint>

#include "megatron/transformer/config/shape.h"

namespace megatron {

struct LetterType;

struct LinearAttentionConfig {
  int64_t linear_num_key_heads = 16;  // of queries and keys
  int64_t linear_num_value_heads = 32;
  int64_t linear_key_head_dim = 128;
  int64_t linear_value_head_dim = 128;
  int64_t linear_conv_kernel_dim = 4;  // tokens that the convolution reads, its own included
  int64_t linear_chunk_size = 64;      // rows of a chunk of the rule

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  bool operator==(const LinearAttentionConfig&) const = default;

  // Channels of all heads of queries or keys, and of values.
  int64_t linear_key_width() const { return linear_num_key_heads * linear_key_head_dim; }
  int64_t linear_value_width() const { return linear_num_value_heads * linear_value_head_dim; }
};

// The letter G. Its rules: heads, also over tensor-parallel ranks; without such layers their flags
// are refused.
extern const LetterType kGatedDeltaLetter;

}  // namespace megatron
