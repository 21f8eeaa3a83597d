// Random changes of what a router computes, drawn by sample and position.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/random.h"

namespace megatron {

// x times U(1 - epsilon, 1 + epsilon) for each element (--moe-input-jitter-eps). Differentiable.
//   x  [s, b, h], placed at `place`
at::Tensor jittered(const at::Tensor& x, double epsilon, RandomKey key,
                    const TokenPositions& place);

// For benchmarks: routing that does not depend on the weights.
struct ForcedRouting {
  bool enabled = false;  // --moe-router-force-load-balancing: logits are N(0, 1)
  // --moe-router-force-biased: besides, a draw N(0, bias_std^2) for each expert and layer is added,
  // the same for all tokens of a step; if negative, of the run; 0: none
  double bias_std = 0.0;
};

// Draws in place of logits [s b, E]; the gradient passes straight through to the logits. `step`
// counts the steps of the run.
at::Tensor forced_logits(const at::Tensor& logits, const ForcedRouting& forced, RandomKey key,
                         const TokenPositions& place, int64_t step);

}  // namespace megatron
