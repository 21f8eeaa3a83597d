// Feed-forward sublayer: norm, FC1, activation, FC2.
#pragma once

#include <string_view>

#include "megatron/transformer/feed_forward/feed_forward.h"

namespace megatron {

// Whether linear_fc2's backward GEMM also applies the backward of the activation, a GELU.
bool is_gelu_in_product(const TransformerConfig& config, int64_t layer_number);

// How an MLP differs that is part of another sublayer.
struct MlpPart {
  std::string_view input = "mlp_norm";  // its input in --offload-modules
  bool recompute_fc1 = false;           // save nothing but its input; needs mlp_act recomputed
};

// Parameters: linear_fc1.{layer_norm_weight, layer_norm_bias, weight, bias}, linear_fc2.{weight,
// bias}. A gated FC1 holds [gate rows | up rows].
class MLP : public FeedForward {
 public:
  // `layer_number` is global and counts from 1.
  MLP(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
      const ParallelGroups& groups, const MlpPart& part = {});
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;

 private:
  const TransformerConfig& config_;
  const MlpPart part_;
  bool activation_inside_;  // linear_fc2 applies the activation
  ColumnParallelLinear linear_fc1_;
  RowParallelLinear linear_fc2_;
};

}  // namespace megatron
