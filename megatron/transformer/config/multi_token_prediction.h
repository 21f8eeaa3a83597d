// Multi-token prediction: further layers after the decoder that predict the tokens after the next
// one.
#pragma once

#include <cstdint>

#include "megatron/transformer/config/shape.h"

namespace megatron {

struct MultiTokenPredictionConfig {
  int64_t mtp_num_layers = 0;  // D: depths of prediction; 0: none
  double mtp_loss_scaling_factor = 0.1;
  bool mtp_use_repeated_layer = false;  // one layer for all depths

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  // Layers with weights of their own.
  int64_t mtp_distinct_layers() const {
    return mtp_use_repeated_layer && mtp_num_layers > 1 ? 1 : mtp_num_layers;
  }
};

}  // namespace megatron
