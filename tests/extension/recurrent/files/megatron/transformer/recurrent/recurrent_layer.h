// A layer with a recurrent state in place of attention: norm, recurrence, norm, MLP.
#pragma once

#include <memory>

#include "megatron/transformer/feed_forward/mlp.h"
#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/recurrent/recurrent_cost.h"

namespace megatron {

struct ParallelGroups;

// y = W_out (s * silu(g)), where s is the gated scan of v with gate sigmoid(f), and [v, g, f] =
// W_in norm(x), each of hidden_size features. Parameters: linear_in.{layer_norm_weight,
// layer_norm_bias, weight, bias}, linear_out.{weight, bias}.
//
// Nothing that it saves is offloaded. Communication: that of its linears over tp. Needs whole
// sequences: not with context parallelism.
class Recurrence : public Sublayer {
 public:
  Recurrence(const TransformerConfig& config, bool sequence_parallel, const ParallelGroups& groups);
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;

 private:
  // [s, b, 3 n/t] -> [s, b, n/t]
  static at::Tensor mix(const at::Tensor& projected, const LayerContext& context);

  ColumnParallelLinear linear_in_;
  RowParallelLinear linear_out_;
};

// Parameters: recurrence..., mlp.... Decoding keeps [n/t] per layer and sequence.
class RecurrentLayer : public Layer {
 public:
  RecurrentLayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                 const ParallelGroups& groups);
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override;
  std::unique_ptr<LayerState> make_state() const override;

 private:
  Recurrence recurrence_;
  MLP mlp_;
  ResidualSublayer recurrence_half_, mlp_half_;
};

std::unique_ptr<Layer> make_recurrent(const TransformerConfig& config, int64_t layer_number,
                                      bool sequence_parallel, const ParallelGroups& groups);

}  // namespace megatron
