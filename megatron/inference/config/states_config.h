// Flags of states of fixed size that sequences own.
#pragma once

#include "megatron/base/fields.h"
#include "megatron/transformer/layer/state_keeping.h"

namespace megatron {

struct SequenceStatesConfig : Config {
  enum class Type { kAuto, kBf16, kFp16, kFp32 };
  Type mamba_inference_conv_states_dtype = Type::kAuto;
  Type mamba_inference_ssm_states_dtype = Type::kAuto;
  bool replay_chunks = false;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
  StateKeeping keeping() const;
  // Throws Error unless states are kept as batch-invariant mode computes them.
  void check_batch_invariant() const;
};

}  // namespace megatron
