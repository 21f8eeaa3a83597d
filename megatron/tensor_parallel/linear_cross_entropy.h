// Fused output projection and cross entropy over chunks of tokens: the logits of a whole
// micro-batch are never in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/comm/process_group.h"
#include "megatron/nn/parameter.h"

namespace megatron {

struct LinearCrossEntropyOptions {
  int64_t vocab_size = 0;
  double z_coeff = 0.0;
  int64_t chunk_tokens = 0;  // tokens per chunk; 0: at most 1 GiB of logits on this rank
  bool sequence_parallel = false;
};

// The loss per token of vocab_parallel_cross_entropy() for the logits x W^T. `loss_grad`, the
// gradient that the loss will get in the backward, must be known before the forward, which turns
// logits into gradients at once. The forward adds the weight's gradient to its target; the backward
// reports it ready, and must follow. Differentiable in x.
//
//   x          [s, b, h]      ([s/t, b, h] with sequence_parallel)
//   weight     [v'/t, h]      shards: dim 0 over kTensor
//   targets    [s, b] int64   negative: ignored
//   loss_grad  [s, b] fp32 (fp64): gradient with respect to the loss per token
//   return     [s, b] fp32 (fp64)
//   hits       as for vocab_parallel_cross_entropy()
//
// Communication: that of the projection, once, and that of the cross entropy, once per chunk.
// Source: Hsu et al. 2024 (arXiv:2410.10989) for gradients in the forward.
at::Tensor linear_cross_entropy(Parameter& weight, const at::Tensor& x, const at::Tensor& targets,
                                const at::Tensor& loss_grad,
                                const LinearCrossEntropyOptions& options, const ProcessGroup& tp,
                                at::Tensor* hits = nullptr);

// Tokens per chunk when `tokens` are split into equal chunks of at most 1 GiB of logits.
int64_t cross_entropy_chunk(int64_t tokens, int64_t columns, int64_t element_bytes);

}  // namespace megatron
