// Causal depthwise convolution and SiLU in front of a state-space scan, and its backward, in bf16.
// CUDA alone; transformer/ssm/causal_conv.h computes the same by tensor operations. Sums and SiLU
// in fp32; deterministic.
//
//   a[t] = bias + sum over k < K of weight[:, k] u[t - K + 1 + k],   y = silu(a)
//
// Rows of other documents, and rows before the first that are not given, count as zero.
#pragma once

#include "megatron/kernels/ssm/scan_rows.h"

namespace megatron {

struct ConvSiluArgs {
  int64_t tokens = 0, samples = 1, channels = 0;
  int64_t width = 4;             // K, 2 to 4
  ScanRows u, y;                 // [channels]; 16-byte aligned, strides and channels multiples of 8
  const void* weight = nullptr;  // [channels, K] bf16
  const void* bias = nullptr;    // [channels] bf16, or null
  ScanRows before;               // K - 1 tokens of u before the first, or null data: zeros
  ScanDocuments documents;
  const int64_t* documents_before =
      nullptr;  // of those tokens, strides as of documents; null: as 0

  // The backward's. Gradients are assigned.
  ScanRows dy, du;
  ScanRows dbefore;            // if before is given, or null data
  float* dweight = nullptr;    // [channels, K]
  float* dbias = nullptr;      // [channels], or null
  float* workspace = nullptr;  // conv_silu_workspace() floats
};

constexpr bool conv_silu_supports(int64_t channels, int64_t width) {
  return channels % 8 == 0 && width >= 2 && width <= 4;
}
int64_t conv_silu_workspace(const ConvSiluArgs& args);  // (K + 1) channels per 128 tokens
void conv_silu_forward_cuda(const ConvSiluArgs& args, void* stream);
void conv_silu_backward_cuda(const ConvSiluArgs& args, void* stream);

}  // namespace megatron
