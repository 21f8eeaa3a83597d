// The gated delta net: norm, in_proj, what lies between (gated_delta_core.h), out_proj.
#pragma once

#include "megatron/transformer/ssm/gated_delta_core.h"
#include "megatron/transformer/ssm/recurrent_sublayer.h"

namespace megatron {

// Parameters: in_proj.{layer_norm_weight, layer_norm_bias, weight}, conv1d.weight, dt_bias, A_log,
// out_norm.weight, out_proj.weight. in_proj holds the rows [q | k | v | z | beta | a].
class GatedDeltaNet : public RecurrentSublayer<GatedDeltaCore> {
 public:
  // `layer_number` is global and counts from 1. Config and groups must outlive it. Throws
  // UsageError if heads and tensor-parallel ranks do not divide.
  GatedDeltaNet(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                const ParallelGroups& groups);
};

}  // namespace megatron
