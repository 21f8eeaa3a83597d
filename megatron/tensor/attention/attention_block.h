// Attention over a block of the keys, in a form whose blocks can be combined: the output of a query
// over all keys is the mean of its outputs over the blocks, weighted by exp(lse). The building
// block of context parallelism.
//
// Source: Dao et al. 2022 (arXiv:2205.14135); Liu et al. 2023 (arXiv:2310.01889).
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "megatron/tensor/attention/attention.h"

namespace megatron {

struct AttentionBlock {
  at::Tensor out;  // [s, b, n, d]: q's type (library kernel) or fp32 (fp64); 0 if no key is seen
  at::Tensor lse;  // [b, n, s] fp32 (fp64): log sum exp of the scaled scores; else -infinity
};

// Not differentiable. Arguments as for core_attention, without sinks. On CUDA cuDNN or flash
// attention if they support exactly these options (two kernels when causal with more keys than
// queries), else ATen operations. Throws Error if --attention-backend requests a backend that does
// not.
AttentionBlock attention_block_forward(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const AttentionOptions& options);

// This block's gradients (dq, dk, dv), in q's type or fp32 (fp64), where `out` (q's type) and `lse`
// are the combination of ALL blocks. Sum dq over the blocks, and dk and dv over the sets of
// queries. Adds the gradient of options.distance_bias to `dbias`, unless that is undefined.
// Bit-reproducible.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_block_backward(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& options,
    const at::Tensor& dbias = {});

// Combines `total` with a block over other keys, in place; `total.out` has the type of `total.lse`.
// Both may be views of rows.
void add_attention_block(const AttentionBlock& total, const AttentionBlock& block);

// Combines `total`, of all keys, with a sink for each head, in place. `sinks`: [n] fp32 (fp64), one
// for each head of out [s, b, n, d]; or of several samples' heads that count as samples, [g, n / g]
// for [s, b g, n / g, d].
void add_attention_sinks(const AttentionBlock& total, const at::Tensor& sinks);

// The gradient of the sinks, in their type; arguments as for attention_block_backward, where `out`
// and `lse` are the combination with the sinks, too.
at::Tensor attention_sinks_grad(const at::Tensor& dout, const at::Tensor& out,
                                const at::Tensor& lse, const at::Tensor& sinks);

}  // namespace megatron
