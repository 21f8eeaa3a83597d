// What makes rows of the language model of an encoder's features.
#pragma once

#include <memory>

#include "megatron/models/vision/vision_config.h"
#include "megatron/tensor_parallel/layers.h"

namespace megatron {

// mlp: LayerNorm if configured (eps 1e-5), FC1, activation, FC2; affine: RMSNorm if configured (of
// Gemma 3: weights from 0, epsilon of the encoder), one linear. Parameters:
// encoder.linear_fc1.{weight, bias, layer_norm_weight, layer_norm_bias}, encoder.linear_fc2...;
// affine: encoder.{weight, bias, layer_norm_weight}. Whole on each rank. Communication: none.
class VisionProjector : public Module {
 public:
  VisionProjector(const VisionConfig& config, const TransformerConfig& language);
  // [N, feature_size()] -> [N, h]
  at::Tensor forward(const at::Tensor& features);

 private:
  const VisionConfig config_;
  const ParallelGroups alone_;
  std::unique_ptr<ColumnParallelLinear> linear_fc1_, linear_fc2_;  // null, affine: the first
};

}  // namespace megatron
