// A tiny transformer of the same structure: the one on which `prove` compares ranks with one rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

// Changes values and says what it changed: "--hidden-size 4096 -> 64".
class Shrinker {
 public:
  explicit Shrinker(std::vector<std::string>& changes) : changes_(changes) {}
  void set(const char* flag, int64_t& value, int64_t to);
  void set(const char* flag, std::optional<int64_t>& value, int64_t to);
  void set(const char* flag, bool& value, bool to);
  void note(std::string change) { changes_.push_back(std::move(change)); }

 private:
  std::vector<std::string>& changes_;
};

// Ranks that divide a layer.
struct ProofRanks {
  int64_t tensor_before = 1;  // of the layout as the user gave it
  int64_t tensor = 1, context = 1;
};

// Sizes of a layer and of its sequence. Heads keep their divisibility by tensor and context ranks,
// groups by heads and ranks, and a window its part of the sequence.
void shrink_layer(TransformerConfig& config, const ProofRanks& ranks, Shrinker& shrinker);

// `segments` divide the layers evenly: at most two layers each, unless layers are configured one by
// one.
void shrink_depth(TransformerConfig& config, int64_t segments, Shrinker& shrinker);

// Every part of a tiny model affects the loss, and nothing rounds on purpose.
void shrink_rounding(TransformerConfig& config, Shrinker& shrinker);

}  // namespace megatron
