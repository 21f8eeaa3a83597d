// Mamba-2 layers, the letter M of a pattern (Dao and Gu 2024, arXiv:2405.21060).
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "megatron/transformer/config/shape.h"

namespace megatron {

struct LetterType;

struct TimeStepLimits {
  double least = 0.0;
  double most = std::numeric_limits<double>::infinity();
};

struct MambaConfig {
  int64_t mamba_state_dim = 128;           // N
  int64_t mamba_head_dim = 64;             // P
  int64_t mamba_num_groups = 8;            // G: of B and C, and of the norm
  std::optional<int64_t> mamba_num_heads;  // H; none: 2 hidden_size / P
  // The least and the largest time step, numbers or "inf"; empty: not limited.
  std::vector<std::string> mamba_dt_limit;
  double mamba_norm_epsilon = 1e-5;  // of the gated norm
  int64_t mamba_chunk_size = 128;    // rows of a chunk of the scan

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  bool operator==(const MambaConfig&) const = default;

  int64_t mamba_heads(const ShapeConfig& shape) const {
    return mamba_num_heads.value_or(2 * shape.hidden_size / mamba_head_dim);
  }
  // Channels of all heads, H P.
  int64_t mamba_width(const ShapeConfig& shape) const {
    return mamba_heads(shape) * mamba_head_dim;
  }
  TimeStepLimits time_step_limits() const;
  // Width of B, and of C, of all groups.
  int64_t mamba_states() const { return mamba_num_groups * mamba_state_dim; }
};

// Tokens that a Mamba-2 convolution reads, its own included.
inline constexpr int64_t kMambaConvWidth = 4;

// The letter M. Its rules: heads and groups, also over tensor-parallel ranks; without such layers
// their flags are refused.
extern const LetterType kMambaLetter;

}  // namespace megatron
