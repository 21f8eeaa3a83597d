// Cross entropy of one vocabulary shard in separate steps, so that tensor_parallel can place its
// reductions between them. Not differentiable: tensor_parallel/cross_entropy.h is.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace megatron {

//   logits   [tokens, v] any floating type; columns >= valid (vocabulary padding) never count
//   targets  [tokens] int64, relative to this shard; outside [0, valid): not in this shard
struct CrossEntropyParts {
  at::Tensor max;     // [tokens] fp32 (fp64): of the valid columns; -inf if there are none
  at::Tensor sum;     // [tokens] fp32 (fp64): over the valid columns of exp(logit - max)
  at::Tensor target;  // [tokens] fp32 (fp64): the target's logit, 0 if not in this shard
};
CrossEntropyParts cross_entropy_parts(const at::Tensor& logits, const at::Tensor& targets,
                                      int64_t valid);

// Combines the parts of all shards of a vocabulary, in place, and returns log(sum) + max of the
// whole, [tokens]. `maximum` and `sum` are in place, over all shards; empty: there is one.
using OverShards = std::function<void(const at::Tensor&)>;
at::Tensor combine_parts(CrossEntropyParts& parts, const OverShards& maximum,
                         const OverShards& sum);

// dlogits = (softmax - onehot) * scale[token] (+ z-loss term: 2 * z_coeff * lse * softmax * scale),
// in the logits' type; padding columns get zero. `lse` = log(sum) + max of the whole vocabulary.
// Written into `logits` if in_place.
at::Tensor cross_entropy_backward(const at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& lse, const at::Tensor& scale, int64_t valid,
                                  double z_coeff, bool in_place);

}  // namespace megatron
