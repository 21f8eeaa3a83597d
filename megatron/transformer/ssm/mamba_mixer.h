// The Mamba-2 sublayer: norm, in_proj, what lies between (mamba_core.h), out_proj.
#pragma once

#include <memory>

#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/ssm/mamba_core.h"

namespace megatron {

// Parameters: in_proj.{layer_norm_weight, layer_norm_bias, weight}, conv1d_weight, conv1d_bias,
// dt_bias, A_log, D, norm.weight, out_proj.weight. in_proj holds the rows [z | x | B | C | dt].
class MambaMixer : public Sublayer {
 public:
  // `layer_number` is global and counts from 1. Config and groups must outlive it. Throws
  // UsageError if heads, groups and tensor-parallel ranks do not divide.
  MambaMixer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
             const ParallelGroups& groups);
  // What recomputation of the whole is called.
  static SublayerNames names() { return {"mamba", ""}; }
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;
  // As Layer::make_state.
  std::unique_ptr<LayerState> make_state() const { return std::make_unique<MambaState>(); }

 private:
  const TransformerConfig& config_;
  MambaCore core_;
  ColumnParallelLinear in_proj_;
  RowParallelLinear out_proj_;
};

}  // namespace megatron
