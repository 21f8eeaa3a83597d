// Recomputation of the layers of the encoders of media, besides that of the language model.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

struct EncoderRecompute {
  RecomputeGranularity encoder_recompute_granularity = RecomputeGranularity::kNone;
  RecomputeMethod encoder_recompute_method = RecomputeMethod::kUniform;
  int64_t encoder_recompute_num_layers = 1;
  bool recompute_vision = false;  // Megatron's spelling of --encoder-recompute-granularity full

  void fields(FieldVisitor& visitor);
  // `layers`: of the encoder that has most.
  void validate(Violations& violations, int64_t layers) const;

  bool recomputes_encoders() const {
    return recompute_vision || encoder_recompute_granularity != RecomputeGranularity::kNone;
  }
  // The layers of an encoder with this in the place of their own.
  TransformerConfig recomputing(TransformerConfig layers) const;
};

}  // namespace megatron
