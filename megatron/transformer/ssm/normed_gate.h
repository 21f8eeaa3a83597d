// RMSNorm over each head and then a gate, and its backward:
//
//   o = w y rstd silu(z),   rstd = 1 / sqrt(mean(y^2) + eps) per token and head
//
// Computed in fp32 (fp64 for fp64).
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

struct NormedGateResult {
  at::Tensor o;     // as y
  at::Tensor rstd;  // [s, b, H] fp32 (fp64)
};
//   y, z [s, b, H, n] with any strides; w [n], which all heads share
NormedGateResult normed_gate(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                             double eps);
// o again, bit for bit.
at::Tensor normed_gate_apply(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                             const at::Tensor& rstd);

struct NormedGateGrads {
  at::Tensor y, z;  // as y, z
  at::Tensor w;     // [n] fp32 (fp64)
};
// `dz`: where the gradient of z is written; undefined: it is made.
NormedGateGrads normed_gate_backward(const at::Tensor& grad, const at::Tensor& y,
                                     const at::Tensor& z, const at::Tensor& w,
                                     const at::Tensor& rstd, const at::Tensor& dz = {});

}  // namespace megatron
