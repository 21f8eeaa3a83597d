// How attention is computed: its kernels, and the exchanges between the ranks of a sequence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/tensor/attention/attention.h"
#include "megatron/transformer/config/shape.h"

namespace megatron {

enum class ContextParallelType { kP2P, kAllGather, kA2A, kA2AP2P };

struct AttentionBackendConfig {
  AttentionBackend attention_backend = AttentionBackend::kAuto;
  bool fast = false;                                // allows nondeterministic kernels
  bool batch_invariant_mode = false;                // tensor/batch_invariant/mode.h
  std::vector<std::string> cp_comm_type = {"p2p"};  // one for all layers, or one per layer

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  ContextParallelType context_parallel_type(int64_t layer_number) const;  // layers count from 1
};

}  // namespace megatron
