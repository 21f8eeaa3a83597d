// The table of layer kinds: each is one row in layer_kinds.cc, which LayerConfig::layer_pattern
// chooses, and files of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/transformer/layer/layer.h"
#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

struct ParallelGroups;

// Makes one layer. `layer_number` is global and counts from 1. Config and groups must outlive it.
using LayerMaker = std::unique_ptr<Layer> (*)(const TransformerConfig& config, int64_t layer_number,
                                              bool sequence_parallel, const ParallelGroups& groups);

struct LayerKind {
  // One letter of Megatron's --hybrid-layer-pattern for each residual connection of the layer:
  // * attention, - MLP, E experts, M Mamba-2, G gated delta net; ours besides: x cross attention,
  // r that of chunks over what was retrieved for them.
  std::string_view letters;
  std::string_view name;
  LayerMaker make;
  LayerCostFunction cost;
  // The names of what a layer adds to ForwardContext::auxiliary_losses; null: nothing
  std::vector<std::string> (*auxiliary_losses)(const TransformerConfig& config,
                                               int64_t layer_number) = nullptr;
};

// Throws Error that names the known letters.
const LayerKind& find_layer_kind(std::string_view letters);

// Makes the layer of the kind that the configuration gives it.
std::unique_ptr<Layer> make_layer(const TransformerConfig& config, int64_t layer_number,
                                  bool sequence_parallel, const ParallelGroups& groups);

// The auxiliary losses of all layers of a model, those of multi-token prediction included, each
// once.
std::vector<std::string> auxiliary_losses(const TransformerConfig& config);

// What that layer costs a rank; as LayerCostFunction.
LayerCost layer_cost(const TransformerConfig& config, int64_t layer_number, const LayerShape& shape,
                     bool offloaded);

}  // namespace megatron
