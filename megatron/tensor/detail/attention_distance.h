// Attention with a bias by distance or a narrow window in one kernel that stores no scores
// (kernels/attention/distance_attention.h). Runs on the current stream; deterministic.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/detail/attention_library.h"
#include "megatron/tensor/detail/row_ranges.h"

namespace megatron {

// Why the kernel does not support exactly this, or "". Shapes as for core_attention; of q, heads
// and samples may be counted together; ranges of rows are those of one sample, which has at most
// `most_keys` keys.
std::string why_not_distance_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionOptions& options, int64_t most_keys = 0);

// Assigns `out` [s, b, n, d]; returns the log-sum-exp of the scores, [b, n, s] fp32. With `ranges`
// tensors are [R, n, d] (keys and values [R_k, n, d]), s and s_k the most rows of a sample; rows in
// no range are neither read nor written.
at::Tensor distance_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& out, const AttentionOptions& options,
                                      const QueryKeyRanges* ranges = nullptr);

// Assigns the gradients, shaped like q, k and v, with their own strides, and adds that of the bias
// to `dbias`, undefined without one.
void distance_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                 const AttentionGrads& grads, const at::Tensor& dbias,
                                 const AttentionOptions& options,
                                 const QueryKeyRanges* ranges = nullptr);

}  // namespace megatron
