// Causal depthwise convolution and SiLU in front of a state-space scan, and its backward: the
// reference that kernels are held against. Sums and SiLU in fp32 (fp64 for fp64).
//
//   a[t] = bias + sum over k < K of weight[:, 0, k] u[t - K + 1 + k],   y = silu(a)
//
// Rows of other documents, and rows before the first that are not given, count as zero.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// Numbers the documents of each sequence: ids [b, s] -> [s, b] int64, larger by one wherever the id
// differs from that of the token before. So two documents that share an id are told apart. Stays on
// the device.
at::Tensor document_runs(const at::Tensor& document_ids);

// What the convolution of a part of a sequence knows of its surroundings.
struct ConvBorders {
  at::Tensor before = {};       // [K - 1, b, C] the rows before the first; undefined: zeros
  at::Tensor runs = {};         // [s, b] document_runs() of the rows; undefined: one document
  at::Tensor runs_before = {};  // [K - 1, b] of the rows before; undefined: the run of row 0
};

//   u, return   [s, b, C], any strides; the result is contiguous
//   weight      [C, 1, K]
//   bias        [C]; undefined: none
at::Tensor causal_conv(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                       const ConvBorders& borders = {});

struct CausalConvGrads {
  at::Tensor u;       // as u
  at::Tensor weight;  // [C, 1, K] fp32 (fp64)
  at::Tensor bias;    // [C] fp32 (fp64); undefined without a bias
  at::Tensor before;  // as borders.before; undefined if that is
};

// Computes a again. `du`: where the gradient of u is written; undefined: it is made.
CausalConvGrads causal_conv_backward(const at::Tensor& dy, const at::Tensor& u,
                                     const at::Tensor& weight, const at::Tensor& bias,
                                     const ConvBorders& borders = {}, const at::Tensor& du = {});

// The last K - 1 rows of [before | u], contiguous: `before` of the rows that follow. `before`
// undefined: zeros.
at::Tensor last_conv_rows(const at::Tensor& before, const at::Tensor& u, int64_t width);

}  // namespace megatron
