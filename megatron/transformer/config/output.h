// What is computed from the last hidden states: logits and the loss of language modelling.
#pragma once

#include <cstdint>

#include "megatron/transformer/config/shape.h"

namespace megatron {

enum class CrossEntropyFusion { kNative, kTe, kLinear };  // kTe: the same as kNative here

struct OutputConfig {
  double final_logit_softcapping = 0.0;  // c: logits become c tanh(logit / c); 0: none
  double logits_scaling = 1.0;           // what logits are divided by
  double z_loss_coeff = 0.0;             // weight of log(Z)^2 per token
  CrossEntropyFusion cross_entropy_fusion_impl = CrossEntropyFusion::kNative;
  // Chunk of kLinear; 0: chosen by the memory of the logits
  int64_t cross_entropy_chunk_tokens = 0;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;
};

}  // namespace megatron
