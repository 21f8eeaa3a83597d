// cuDNN's fused attention through its frontend's graphs, deterministic in forward and backward
// unless the options say otherwise.
//
// Tensors are [b, n, s, d] (keys and values [b, g, s, d]; values and output may be narrower), of
// any strides with a contiguous last dimension; nothing is copied. Runs on the current stream. A
// graph is built for each shape and thread at its first use.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/detail/row_ranges.h"

namespace megatron {

// Why cuDNN does not support this, or "". Queries the library once per shape.
std::string why_not_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options);

// Assigns `out` [b, n, s, d]; returns the log-sum-exp of the scores, [b, n, s, 1] fp32.
at::Tensor cudnn_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& out, const AttentionOptions& options);

// Assigns dq, dk and dv, shaped like q, k and v, with their own strides. The deterministic backward
// processes part of the batch at a time if its scratch memory, two bytes per score, would be large.
void cudnn_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                              const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                              const AttentionOptions& options);

// The same for ranges of rows. Tensors are [rows, n, d] and [rows_k, g, d], of any strides with a
// contiguous last dimension. Rows in no range are neither read nor written. Without sinks; the
// log-sum-exp is [b, n, most, 1].
std::string why_not_cudnn_ranges(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const QueryKeyRanges& ranges, const AttentionOptions& options);
// Whether there is a plan for the forward alone.
bool cudnn_has_ranges_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& out, const QueryKeyRanges& ranges,
                              const AttentionOptions& options);
at::Tensor cudnn_ranges_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& out, const QueryKeyRanges& ranges,
                                const AttentionOptions& options);
void cudnn_ranges_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                           const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                           const QueryKeyRanges& ranges, const AttentionOptions& options);

}  // namespace megatron
