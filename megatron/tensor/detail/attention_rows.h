// Attention row by row, each by the kernel that decodes (kernels/attention/paged_attention.h): a
// row has the bits that it has beside a cache. For batch-invariant mode, on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/attention/attention_block.h"

namespace megatron {

// Why not, or "".
std::string why_not_rows(const AttentionOptions& options);

// Shapes as for core_attention, `out` in q's type; with the sinks. A mask must leave each query an
// uninterrupted range of keys up to its last one, as the borders of documents do; throws Error.
AttentionBlock rows_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionOptions& options);

}  // namespace megatron
