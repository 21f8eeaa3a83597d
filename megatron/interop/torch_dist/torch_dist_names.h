// Keys of tensors in Megatron-LM's checkpoints, and the names of ours that they stand for.
//
//   decoder.layers.self_attention.linear_proj.weight    [layers, ...]: of all layers
//   decoder.layers.3.self_attention.linear_proj.weight  of one, where layers differ in kind
//   decoder.layers.3.mlp.experts.experts.linear_fc1.weight      [experts, ...]: of all experts
//   decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w  of one expert: the gate's rows,
//                                                     weight_v being the others; dense layers, too
//   mtp.layers.0.transformer_layer.mlp.router.weight    of a layer of multi-token prediction
//   decoder.layers.3.mixer.in_proj.weight.dt            of one layer of a --hybrid-layer-pattern,
//                                                     whose layers are never stacked: rows of a
//                                                     projection or convolution by what they give
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

// A key, split up.
struct TorchDistKey {
  std::string block;  // "decoder.layers.", "mtp.layers."; empty: not of a layer
  // Of one layer; none: of all layers, or not of a layer
  std::optional<int64_t> layer;
  std::string name;               // our name behind the block and the layer
  std::optional<int64_t> expert;  // of one expert; none: of all, or not of experts
  int half = -1;                  // of a gated FC1: gate 0, up 1; -1: both
  std::string part;               // of rows by what they give: "dt"; empty: all rows

  bool is_stacked() const { return !block.empty() && !layer; }
  std::string ours(int64_t of_layer) const;
};

// Layers without Transformer Engine, and some other programs, have other names for some norms.
// `is_ours`: whether the model has a tensor of this name.
TorchDistKey parse_torch_dist_key(const std::string& key);
std::string our_name(const TorchDistKey& key, int64_t layer,
                     const std::function<bool(const std::string& name)>& is_ours);

// Rows [first, first + count) of a tensor of ours, which Megatron-LM stores by themselves.
struct TorchDistRows {
  std::string_view part;  // "dt"
  int64_t first, count;
};
// Those of a tensor, in order; empty: it is stored whole.
std::vector<TorchDistRows> torch_dist_rows(std::string_view name, const TransformerConfig& config);

// Where a tensor of ours, or its rows of a part, are in Megatron-LM's files.
struct TorchDistPlace {
  std::string key;
  std::optional<int64_t>
      layer;  // its index in the key's first dimension; none: it is all of the key
};
TorchDistPlace torch_dist_place(const std::string& name, const TransformerConfig& config,
                                std::string_view part = {});

// Whether Megatron-LM stores a weight as its difference from 1 where ours is plain: that of the
// norm in a gated delta net, with --apply-layernorm-1p.
bool is_stored_from_one(std::string_view name, const TransformerConfig& config);

// Modules whose (empty) extra state Megatron-LM expects when it loads.
struct TorchDistState {
  std::string key;                            // "decoder.layers.mlp.linear_fc1._extra_state"
  std::vector<int64_t> offset, global_shape;  // of the object: the layer, the expert
};
std::vector<TorchDistState> torch_dist_states(const std::string& name,
                                              const TransformerConfig& config);

}  // namespace megatron
