// Samples a token from the logits of one position.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "megatron/base/fields.h"

namespace megatron {

// Flags of sampling; the defaults sample from the unmodified distribution.
struct SamplingConfig : Config {
  bool greedy = false;
  double temperature = 1.0;
  int64_t top_k = 0;   // 0: all tokens
  double top_p = 0.0;  // 0: all tokens
  int64_t seed = 1234;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// Samples a token from one row of logits. The random number depends only on (seed, row, position),
// so the text of a prompt does not depend on its batch.
//
//   logits  [v] on the CPU, any floating type; only the first vocab_size columns are used
int64_t sample_token(const at::Tensor& logits, int64_t vocab_size, const SamplingConfig& config,
                     int64_t row, int64_t position);

}  // namespace megatron
