// Where the norms of a layer stand, as its sublayers ask.
#pragma once

#include "megatron/transformer/config/layer.h"

namespace megatron {

// The fourth --norm-placement, residual: norms take the sum of a sublayer's output and its input,
// as in BERT and the first Transformer; there is no final norm, since the last layer's output has
// one. Apart from the enumeration, as only the functions below tell it from kSandwich.
inline constexpr NormPlacement kResidualPlacement{3};

inline bool norms_sums(const LayerConfig& config) {
  return config.norm_placement == kResidualPlacement;
}
// The input of a sublayer.
inline bool norms_inputs(const LayerConfig& config) {
  return config.has_pre_norm() && !norms_sums(config);
}
// The input of a layer's attention; layers count from 1.
inline bool norms_attention_input(const LayerConfig& config, int64_t layer_number) {
  return norms_inputs(config) && (config.first_input_norm || layer_number > 1);
}
// The output of the last layer.
inline bool has_final_norm(const LayerConfig& config) { return !norms_sums(config); }

}  // namespace megatron
