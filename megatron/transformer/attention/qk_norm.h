// Norm of queries or keys, per head or over all heads of a token.
#pragma once

#include <memory>

#include "megatron/comm/process_group.h"
#include "megatron/nn/norm.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

// Parameters: weight (and bias of a LayerNorm): [d], or [heads * d] split over the tensor-parallel
// group with --qk-layernorm-over-heads.
//
//   x, return   [s, b, n, d], n the heads of this rank
//
// Communication: over heads, an all-reduce of one value per token forward and backward; per head
// none. Source: Henry et al. 2020 (arXiv:2010.04245); over heads: OLMo 2 (arXiv:2501.00656).
//
// Keeps a reference to the group, which must outlive it.
class QKNorm : public Module {
 public:
  // `heads`: those of all tensor-parallel ranks together.
  QKNorm(const TransformerConfig& config, int64_t heads, const ProcessGroup& tp);
  at::Tensor forward(const at::Tensor& x);

  // Inputs of forward and backward when the norm is over all heads.
  struct OverHeads {
    Parameter weight;
    int64_t features = 0;  // over all ranks
    double eps = 0.0;
    bool zero_centered = false;
    const ProcessGroup* tp = nullptr;
  };

 private:
  std::unique_ptr<Norm> per_head_;
  std::unique_ptr<OverHeads> over_heads_;
};

}  // namespace megatron
