#include "megatron/models/common/encoder_prefetch.h"

#include "megatron/base/format.h"

namespace megatron {

void EncoderPrefetch::fields(FieldVisitor& v) {
  v.role(FieldRole::kMachine);
  v.field("mimo_encoder_prefetch", mimo_encoder_prefetch,
          "frozen encoders of images and sounds compute the features of micro-batches before their "
          "turn, on GPUs beside other work");
  v.field("mimo_encoder_prefetch_depth", mimo_encoder_prefetch_depth,
          "micro-batches of a step that have features before their turn");
}

void EncoderPrefetch::validate(Violations& v) const {
  v.require(mimo_encoder_prefetch_depth > 0,
            cat("--mimo-encoder-prefetch-depth is ", mimo_encoder_prefetch_depth),
            "a positive number");
}

}  // namespace megatron
