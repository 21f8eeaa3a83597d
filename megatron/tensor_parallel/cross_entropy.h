// Cross entropy over logits whose vocabulary is split over the tensor-parallel group.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/comm/process_group.h"

namespace megatron {

// Loss per token: log sum exp - logit of the target (+ z_coeff * lse^2). Differentiable in logits;
// the backward may overwrite them, so nothing else may read them after the backward has begun.
//
//   logits   [s, b, v'/t]   columns from vocab_size on (global numbering) are padding and never
//   count targets  [s, b] int64; a negative target (ignored label) has loss 0 and no gradient
//   return   [s, b] fp32 (fp64)
//
// Communication: forward a max and a sum all-reduce of one value per token; backward none.
// Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        int64_t vocab_size, double z_coeff, const ProcessGroup& tp);

// The same of logits [n, v'/t] and targets [n] numbered from this rank's first column, of which `valid` count; ignored
// targets are the caller's. Not differentiable.
struct TokenLosses {
  at::Tensor loss;  // [n] fp32 (fp64)
  at::Tensor lse;   // [n] log sum exp over the whole vocabulary
};
TokenLosses token_losses(const at::Tensor& logits, const at::Tensor& targets, int64_t valid,
                         double z_coeff, const ProcessGroup& tp);

}  // namespace megatron
