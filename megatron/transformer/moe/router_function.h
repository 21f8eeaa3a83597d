// The differentiable outputs of a router's pass over its logits: weights and losses with one
// backward, which writes the gradient of the logits once.
#pragma once

#include "megatron/tensor/experts/routing.h"

namespace megatron {

struct RouterOutputs {
  at::Tensor weights;                            // [N, k]; undefined if the pass has none
  std::array<at::Tensor, kBalanceTerms> losses;  // [] fp64; undefined: no such loss
};

// What was computed from `logits`, connected to them.
//   pass, sums  router_pass() or router_sums() of the logits, and what was given to it
//   losses      router_losses() of the pass; default: none
RouterOutputs router_outputs(const at::Tensor& logits, const RoutingOptions& options,
                             const RouterPass& pass, const RouterSums& sums = {},
                             const RouterLosses& losses = {});

}  // namespace megatron
