// Features of frozen encoders of media that are computed before their micro-batch's turn.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"

namespace megatron {

struct EncoderPrefetch {
  bool mimo_encoder_prefetch = false;
  int64_t mimo_encoder_prefetch_depth = 2;  // micro-batches that have features before their turn

  void fields(FieldVisitor& visitor);
  void validate(Violations& violations) const;

  // Of a step; 0: features are computed in their micro-batch's turn.
  int64_t microbatches_ahead() const {
    return mimo_encoder_prefetch ? mimo_encoder_prefetch_depth : 0;
  }
};

}  // namespace megatron
