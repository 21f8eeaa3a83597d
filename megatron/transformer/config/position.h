// How positions enter a transformer: learned embeddings, rotations of queries and keys, or numbers
// for their distances.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megatron/transformer/config/shape.h"

namespace megatron {

// When the configuration is finalized kYarn becomes kRope with RopeScaling::kYarn, and kMrope kRope
// with mrope_section.
// kRelative: numbers of a table are added to the scores of attention, by distance.
enum class PositionEmbedding { kLearnedAbsolute, kRope, kNone, kYarn, kRelative, kMrope };
// How rotary frequencies are scaled for sequences longer than a model was trained on. kLinear: all
// divided by the factor; kLlama3: long wavelengths only; kYarn: Peng et al. 2023
// (arXiv:2309.00071); kLongRope: Ding et al. 2024 (arXiv:2402.13753), one factor per frequency,
// from one list up to the original length and from another one beyond.
enum class RopeScaling { kNone, kLinear, kLlama3, kYarn, kLongRope };
struct RotaryScaling {
  RopeScaling type = RopeScaling::kNone;
  double factor = 1.0;
  std::optional<double> attention_factor;  // of cos and sin; none: as the type prescribes
};

struct PositionConfig {
  PositionEmbedding position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  bool use_rotary_position_embeddings = false;  // old alias of --position-embedding-type rope
  bool add_position_embedding = true;           // false: no learned position embedding
  double rotary_base = 10000.0;
  double rotary_percent = 1.0;
  bool rotary_interleaved = false;
  // Rotated pairs that turn with the first, second and third of a token's positions, in this order;
  // empty: a token has one position. Wang et al. 2024 (arXiv:2409.12191)
  std::vector<int64_t> mrope_section;
  // Not a flag: each section has the frequencies of a head of its own (encoders of images)
  bool sections_begin_anew = false;
  std::optional<int64_t> rotary_seq_len_interpolation_factor;
  // Base of windowed layers, which then use no RoPE scaling
  std::optional<double> rotary_base_local;
  bool use_rope_scaling = false;  // Megatron's spelling of rope_scaling_type llama3
  RopeScaling rope_scaling_type = RopeScaling::kNone;
  double rope_scaling_factor = 8.0;
  int64_t rope_original_max_position_embeddings = 8192;
  double rope_low_freq_factor = 1.0, rope_high_freq_factor = 4.0;  // llama3
  double yarn_beta_fast = 32.0, yarn_beta_slow = 1.0;
  bool yarn_correction_range_round_to_int = true;
  std::vector<double> longrope_short_factor, longrope_long_factor;  // one per rotated pair
  // Multiplies cos and sin; none: as the scaling type prescribes
  std::optional<double> rope_attention_factor;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  // Replaces aliases by what they stand for.
  void finalize();
  int64_t rotary_width(const ShapeConfig& shape) const;  // rotated features of a head

 private:
  void validate_scaling(Violations& v, const ShapeConfig& shape) const;
};

}  // namespace megatron
