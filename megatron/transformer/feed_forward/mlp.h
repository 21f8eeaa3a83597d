// Feed-forward sublayer: norm, FC1, activation, FC2.
#pragma once

#include "megatron/tensor_parallel/layers.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

class OffloadedPass;

// Whether linear_fc2's backward GEMM also applies the backward of the activation, a GELU.
bool is_gelu_in_product(const TransformerConfig& config, int64_t layer_number);

// Parameters: linear_fc1.{layer_norm_weight, layer_norm_bias, weight, bias}, linear_fc2.{weight,
// bias}. A gated FC1 holds [gate rows | up rows].
//
//   x            [s, b, h]   (s/t with sequence parallelism)
class MLP : public Module {
 public:
  // `layer_number` is global and counts from 1.
  MLP(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
      const ParallelGroups& groups);
  // Returns {output, residual}, both shaped as x; with `add` {output + residual, undefined}. Saved
  // activations that --offload-modules names go to `offload`; null: none do.
  SublayerOutput forward(const at::Tensor& x, OffloadedPass* offload = nullptr, bool add = false);

 private:
  const TransformerConfig& config_;
  bool activation_inside_;  // linear_fc2 applies the activation
  ColumnParallelLinear linear_fc1_;
  RowParallelLinear linear_fc2_;
};

}  // namespace megatron
