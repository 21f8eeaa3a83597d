// The Mamba-2 sublayer: norm, in_proj, what lies between (mamba_core.h), out_proj.
#pragma once

#include "megatron/transformer/ssm/mamba_core.h"
#include "megatron/transformer/ssm/recurrent_sublayer.h"

namespace megatron {

// Parameters: in_proj.{layer_norm_weight, layer_norm_bias, weight}, conv1d_weight, conv1d_bias,
// dt_bias, A_log, D, norm.weight, out_proj.weight. in_proj holds the rows [z | x | B | C | dt].
class MambaMixer : public RecurrentSublayer<MambaCore> {
 public:
  // `layer_number` is global and counts from 1. Config and groups must outlive it. Throws
  // UsageError if heads, groups and tensor-parallel ranks do not divide.
  MambaMixer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
             const ParallelGroups& groups);
  // What recomputation of the whole is called.
  static SublayerNames names() { return {"mamba", ""}; }
};

}  // namespace megatron
