// What makes rows of the language model of an encoder's features of sounds.
#pragma once

#include <memory>

#include "megatron/models/audio/audio_config.h"
#include "megatron/tensor_parallel/layers.h"

namespace megatron {

// mlp: FC1, activation, FC2; affine: one linear. Parameters: encoder.linear_fc1|linear_fc2.{weight,
// bias}; affine: encoder.{weight, bias}. Whole on each rank. Communication: none.
class AudioProjector : public Module {
 public:
  AudioProjector(const AudioConfig& config, const TransformerConfig& language);
  // [N, audio_feature_size()] -> [N, h]
  at::Tensor forward(const at::Tensor& features);

 private:
  const AudioConfig config_;
  const ParallelGroups alone_;
  std::unique_ptr<ColumnParallelLinear> linear_fc1_, linear_fc2_;  // null, affine: the first
};

}  // namespace megatron
