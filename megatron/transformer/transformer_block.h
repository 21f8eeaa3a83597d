// The layers of one pipeline stage (or model chunk), and the final norm on the last stage.
#pragma once

#include <memory>
#include <vector>

#include "megatron/nn/norm.h"
#include "megatron/transformer/attention/rotary_embedding.h"
#include "megatron/transformer/layer/layer_runner.h"
#include "megatron/transformer/layer_kinds.h"

namespace megatron {

// Keeps references to config and groups, which must outlive it.
//
// Parameters: layers.N... with N the global layer index from 0, final_layernorm.{weight, bias}, of
// hybrid models final_norm.{weight, bias}.
class TransformerBlock : public Module {
 public:
  // Layers [first_layer, first_layer + num_layers), counted from 0. `numbered_after`: layers of
  // another stack that come before, so that their draws of dropout differ.
  TransformerBlock(const TransformerConfig& config, int64_t first_layer, int64_t num_layers,
                   bool final_norm, bool sequence_parallel, const ParallelGroups& groups,
                   LayerMaker make = make_layer, int64_t numbered_after = 0);

  //   x, return   as for Layer::forward
  at::Tensor forward(at::Tensor x, const ForwardContext& context);
  // Layer::keep_encoded() of every layer.
  void keep_encoded(const at::Tensor& encoded, DecodingState& state, const SequenceSlot& slot);

 private:
  at::Tensor run(at::Tensor x, const LayerContext& context);
  LayerRotary rotary_tables(const ForwardContext& pass, at::ScalarType type) const;

  const TransformerConfig& config_;
  RotaryEmbedding rotary_;
  const ProcessGroup& tp_;
  LayerRunner runner_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<Norm> final_layernorm_;
};

}  // namespace megatron
