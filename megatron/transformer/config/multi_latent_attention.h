// Multi-latent attention: queries, and keys with values, are projected from low-rank latents, and
// only a part of each head is rotated (DeepSeek-V2, arXiv:2405.04434).
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/transformer/config/shape.h"

namespace megatron {

struct TransformerConfig;

// How MLA's rotary frequencies are stretched; kYarn has no effect at a factor of 1.
enum class LatentRope { kRope, kYarn };

struct MultiLatentAttentionConfig {
  bool multi_latent_attention = false;
  std::optional<int64_t> q_lora_rank;  // width of the queries' latent; none: projected directly
  int64_t kv_lora_rank = 32;           // width of the latent of keys and values
  int64_t qk_head_dim = 128;           // not rotated features of a query head
  int64_t qk_pos_emb_head_dim = 64;    // rotated ones; the key's are shared by all heads
  int64_t v_head_dim = 128;
  // Epsilon of the norms of latents (--qk-layernorm); none: layernorm_epsilon
  std::optional<double> latent_norm_epsilon;
  LatentRope rope_type = LatentRope::kYarn;
  double rotary_scaling_factor = 1.0;
  double mscale = 1.0, mscale_all_dim = 0.0;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  int64_t query_head_size() const { return qk_head_dim + qk_pos_emb_head_dim; }
  bool stretches_positions() const {
    return rope_type == LatentRope::kYarn && rotary_scaling_factor > 1.0;
  }
  // Factor of cosines and sines, and of attention scores: with m(x) = 0.1 x ln(factor) + 1
  // m(mscale) / m(mscale_all_dim) and m(mscale_all_dim)^2.
  double rotary_magnitude() const;
  double score_magnitude() const;
};

// The rules between this topic and the others, when multi_latent_attention is on.
void validate_multi_latent_attention(const TransformerConfig& config, Violations& v);

}  // namespace megatron
