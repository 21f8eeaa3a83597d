// A model whose layers are one residual connection each, named by letters: Megatron's
// --hybrid-layer-pattern.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/transformer/config/shape.h"

namespace megatron {

struct HybridConfig {
  // Letters of the layers in order; `|` ends a segment of the pipeline. Empty: layers are pairs of
  // attention and MLP.
  std::string hybrid_layer_pattern;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  bool is_hybrid() const { return !hybrid_layer_pattern.empty(); }
  // Without `|`.
  std::string hybrid_letters() const;
  int64_t count_hybrid_letter(char letter) const;
  // The list of --moe-layer-freq that says the same as the letters.
  std::string hybrid_moe_layers() const;
  // Layers of each segment; empty: the pattern has no `|`.
  std::vector<int64_t> hybrid_segments() const;
  // The letter of a layer, which counts from 1. Of a hybrid model only.
  std::string_view hybrid_letter(int64_t layer_number) const;
};

// The pattern with `|` between segments of so many letters.
std::string pattern_of_segments(std::string_view letters, const std::vector<int64_t>& segments);

}  // namespace megatron
