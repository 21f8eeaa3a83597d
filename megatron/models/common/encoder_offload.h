// Which saved activations of encoders of media are in host memory between forward and backward,
// besides those of the language model.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/models/common/encoder_recompute.h"

namespace megatron {

struct EncoderOffload {
  // Of every trained encoder, all its layers; modules as in OffloadConfig::offload_modules
  std::vector<std::string> encoder_offload_modules;

  void fields(FieldVisitor& visitor);
  // `again`: what the same layers recompute.
  void validate(Violations& violations, const EncoderRecompute& again) const;

  bool offloads_encoders() const { return !encoder_offload_modules.empty(); }
  // The layers of an encoder with this in the place of their own. Media differ from micro-batch to
  // micro-batch, so that tensors of any size are offloaded: their passes have an AnySizeOffload.
  TransformerConfig offloading(TransformerConfig layers) const;
};

// What the layers of encoders keep between forward and backward.
struct EncoderActivations : EncoderRecompute, EncoderOffload {
  TransformerConfig keeping(TransformerConfig layers) const {
    return offloading(recomputing(std::move(layers)));
  }
};

}  // namespace megatron
