// Attention over a part of the keys, in a form whose parts can be added up: the output of a query
// over all keys is the mean of its outputs over the parts, weighted by exp(lse). What context
// parallelism is built from.
//
// Source: Dao et al. 2022 (arXiv:2205.14135); Liu et al. 2023 (arXiv:2310.01889).
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "megatron/tensor/attention.h"

namespace megatron {

struct AttentionBlock {
  at::Tensor out;  // [s, b, n, d]: q's type from a library kernel, else fp32 (fp64 for fp64); 0
                   // where nothing is seen
  at::Tensor lse;  // [b, n, s] fp32 (fp64): log sum exp of the scaled scores; -infinity where a
                   // query sees no key
};

// Not differentiable. Arguments as core_attention's. On CUDA cuDNN or flash attention where they
// compute exactly this (two kernels when causal with more keys than queries), else ATen operations.
// Throws Error when --attention-backend asks for what cannot compute this.
AttentionBlock attention_block_forward(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const AttentionOptions& options);

// Gradients (dq, dk, dv), in q's type or fp32 (fp64), that flow through this block when `out` (q's
// type) and `lse` are those of ALL blocks added up. dq of several blocks and dk, dv of several sets
// of queries are sums. The same bits in every run.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_block_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& options);

// Adds a block over other keys to `total`, in place; `total.out` has the type of `total.lse`. Both
// may be views of rows.
void add_attention_block(const AttentionBlock& total, const AttentionBlock& block);

}  // namespace megatron
