// The feed-forward part of a layer: norm, FC1, activation, FC2.
#pragma once

#include "megatron/tensor_parallel/layers.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

class OffloadedPass;

// Whether the gradient before the activation, a GELU, comes out of the product of linear_fc2's
// backward.
bool is_gelu_in_product(const TransformerConfig& config, int64_t layer_number);

// Parameters: linear_fc1.{layer_norm_weight, layer_norm_bias, weight, bias}, linear_fc2.{weight,
// bias}. A gated FC1 holds [gate rows | up rows].
//
//   x            [s, b, h]   (s/t with sequence parallelism); return: as x, and x for the residual
class MLP : public Module {
 public:
  // `layer_number` is global and counts from 1.
  MLP(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
      const ParallelGroups& groups);
  // What --offload-modules names of what is saved goes to `offload`, which may be null.
  // `add`: gives x + what it makes of it, and no x.
  SublayerOutput forward(const at::Tensor& x, OffloadedPass* offload = nullptr, bool add = false);

 private:
  const TransformerConfig& config_;
  bool activation_inside_;  // linear_fc2 applies it
  ColumnParallelLinear linear_fc1_;
  RowParallelLinear linear_fc2_;
};

}  // namespace megatron
