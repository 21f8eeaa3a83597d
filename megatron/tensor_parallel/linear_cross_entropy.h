// Output projection and cross entropy in one, some tokens at a time: the logits of a whole
// micro-batch never exist.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/comm/process_group.h"
#include "megatron/nn/parameter.h"

namespace megatron {

struct LinearCrossEntropyOptions {
  int64_t vocab_size = 0;
  double z_coeff = 0.0;
  int64_t chunk_tokens = 0;  // tokens at a time; 0: as many as have 1 GiB of logits on this rank
  bool sequence_parallel = false;
};

// The loss per token of vocab_parallel_cross_entropy() for the logits x W^T. What the backward will
// be given is known before: `loss_grad`, so that logits become gradients at once. The weight's
// gradient is added to its target in the forward and reported ready in the backward, which must
// follow. Differentiable in x.
//
//   x          [s, b, h]      ([s/t, b, h] with sequence_parallel)
//   weight     [v'/t, h]      shards: dim 0 over kTensor
//   targets    [s, b] int64   negative: ignored
//   loss_grad  [s, b] fp32 (fp64): the gradient that the loss per token gets
//   return     [s, b] fp32 (fp64)
//
// Communication: as the projection and the cross entropy by themselves, the latter for each part.
// Source: Hsu et al. 2024 (arXiv:2410.10989) for gradients in the forward.
at::Tensor linear_cross_entropy(Parameter& weight, const at::Tensor& x, const at::Tensor& targets,
                                const at::Tensor& loss_grad,
                                const LinearCrossEntropyOptions& options, const ProcessGroup& tp);

// Tokens at a time of `tokens` in all: equal parts, each of at most 1 GiB of logits.
int64_t cross_entropy_chunk(int64_t tokens, int64_t columns, int64_t element_bytes);

}  // namespace megatron
