// Batch-invariant attention on a GPU (kernels/attention/ordered_attention.h): one kernel for
// training, prompts and decoding.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "megatron/tensor/attention/attention_block.h"
#include "megatron/tensor/attention/paged_attention.h"

namespace megatron {

// Why not for these [s, b, n, d], or "".
std::string why_not_ordered(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionOptions& options);

// Shapes as for core_attention, causal, the queries being the last of the keys' positions.
AttentionBlock ordered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const AttentionOptions& options);

// Rows of a ragged batch over a cache, q [t, 1, n, d] -> [t, 1, n, d]. Throws Error if the kernel
// does not compute this.
at::Tensor ordered_rows(const at::Tensor& q, const PagedView& keys, const PagedView& values,
                        const PagedRows& rows, const AttentionOptions& options);

}  // namespace megatron
