// Attention in which all queries of a sample see the same keys, as behind a mask of padding or of
// neighbours that are not there: libtorch's memory-efficient kernel, the mask as a bias. CUDA, bf16
// and fp16.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/detail/attention_library.h"

namespace megatron {

// Why not, or "". Shapes as for core_attention.
std::string why_not_masked_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionOptions& options);

struct MaskedAttention {
  at::Tensor out;                // [b, s, n, v]
  at::Tensor lse, seed, offset;  // for the backward
};
MaskedAttention masked_attention_forward(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const AttentionOptions& options);
// Bit-reproducible: keys are not divided over blocks that add to one gradient.
AttentionGrads masked_attention_backward(const at::Tensor& dout, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const MaskedAttention& forward,
                                         const AttentionOptions& options);

}  // namespace megatron
