// Attention as ATen operations: every option, any device and type, softmax in fp32 (fp64).
//
// Memory: the scores of a few heads at a time (kScoreElements). Saves no probabilities; the
// backward recomputes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "megatron/tensor/attention/attention_block.h"

namespace megatron {

// Shapes as for core_attention.
at::Tensor unfused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options);

// (dq, dk, dv), with the shapes and types of q, k, v; adds the gradient of options.distance_bias to
// `dbias`.
std::tuple<at::Tensor, at::Tensor, at::Tensor> unfused_attention_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const AttentionOptions& options, const at::Tensor& dbias = {});

// attention_block_forward and attention_block_backward (tensor/attention/attention_block.h);
// gradients in fp32 (fp64), that of options.distance_bias added to `dbias`.
AttentionBlock unfused_block(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options);
std::tuple<at::Tensor, at::Tensor, at::Tensor> unfused_block_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& options,
    const at::Tensor& dbias = {});

// Bool, True = may not attend, from `causal`, the window and `mask`: [s, s_k], [1 or b, 1, s, s_k],
// or undefined if nothing is masked.
at::Tensor attention_mask(const at::Tensor& q, const at::Tensor& k,
                          const AttentionOptions& options);

}  // namespace megatron
