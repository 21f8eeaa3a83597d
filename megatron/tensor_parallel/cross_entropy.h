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
//   hits     unless null becomes [s, b] bool: no logit is larger than that of the target
//
// Communication: forward a max and a sum all-reduce of one value per token; backward none.
// Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        int64_t vocab_size, double z_coeff, const ProcessGroup& tp,
                                        at::Tensor* hits = nullptr);

// As above for logits [n, v'/t], of which the first `valid` columns count, and targets [n] numbered
// from this rank's first column. The caller handles ignored targets. Not differentiable.
struct TokenLosses {
  at::Tensor loss;             // [n] fp32 (fp64)
  at::Tensor lse;              // [n] log sum exp over the whole vocabulary
  at::Tensor largest, target;  // [n] logits: the largest one, and that of the target
};
TokenLosses token_losses(const at::Tensor& logits, const at::Tensor& targets, int64_t valid,
                         double z_coeff, const ProcessGroup& tp);
// As above in two halves, so that the exchange of the statistics between them can overlap with
// other work. Not differentiable by autograd.
class SplitCrossEntropy {
 public:
  // logits [s, b, columns]: part number `part` of the vocabulary; overwritten by the gradient. The
  // rest as above.
  SplitCrossEntropy(const at::Tensor& logits, const at::Tensor& targets, int64_t vocab_size,
                    double z_coeff, int part);

  // [3, s b] fp32 (fp64): what every rank needs from this part of the vocabulary.
  const at::Tensor& statistics() const { return statistics_; }
  // [s, b] loss per token, from the statistics of all parts in order, [parts, 3, s b]. The same
  // bits on every rank.
  at::Tensor loss(const at::Tensor& all);
  // Gradient with respect to the logits, [s, b, columns], given that of the losses, [s, b]. Call
  // after loss().
  at::Tensor backward(const at::Tensor& grad_loss);

 private:
  int64_t s_, b_;
  int64_t valid_;  // columns that are not padding
  double z_coeff_;
  at::Tensor logits_, targets_, ignored_, statistics_, lse_;
};

}  // namespace megatron
