// The layers of one pipeline stage (or model chunk), and the final norm on the last stage.
#pragma once

#include <memory>
#include <vector>

#include "megatron/nn/norm.h"
#include "megatron/nn/recompute.h"
#include "megatron/transformer/attention/rotary_embedding.h"
#include "megatron/transformer/transformer_layer.h"

namespace megatron {

// Keeps references to config and groups, which must outlive it.
//
// Parameters: layers.N... with N the global layer index from 0, final_layernorm.{weight, bias}.
class TransformerBlock : public Module {
 public:
  // Layers [first_layer, first_layer + num_layers), counted from 0.
  TransformerBlock(const TransformerConfig& config, int64_t first_layer, int64_t num_layers,
                   bool final_norm, bool sequence_parallel, const ParallelGroups& groups);

  //   x, return  [s, b, h]
  //
  // With a tape in the context and full recomputation, layers are recomputed in the backward; with
  // --distribute-saved-activations each tensor-parallel rank keeps 1/t of their saved inputs.
  at::Tensor forward(at::Tensor x, const ForwardContext& context);

 private:
  // Runs layers [first, last); activations of layers before `offloaded` go to host memory.
  at::Tensor run_layers(at::Tensor x, size_t first, size_t last, size_t offloaded,
                        LayerContext context);
  RecomputeTape::Keeper input_keeper(const ForwardContext& pass, bool offloaded) const;

  const TransformerConfig& config_;
  const ProcessGroup& tp_;
  RotaryEmbedding rotary_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<Norm> final_layernorm_;
};

}  // namespace megatron
