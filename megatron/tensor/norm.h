// RMSNorm and LayerNorm, forward and backward; statistics and sums in fp32 (fp64 for fp64 inputs).
// Not differentiable: the layers write their own backwards.
//
//   LayerNorm  y = (x - mean) * rstd * g + b        RMSNorm  y = x * rstd * g
//   with g = weight, or 1 + weight when zero_centered (--apply-layernorm-1p).
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

enum class Normalization { kLayerNorm, kRMSNorm };

struct NormResult {
  at::Tensor y;     // shape and type of x
  at::Tensor mean;  // [rows] fp32 (fp64); undefined for RMSNorm
  at::Tensor rstd;  // [rows] fp32 (fp64)
};

//   x [..., h], weight [h], bias [h] or undefined
// `amax` [1] fp32, or undefined, is raised to the largest |y|.
NormResult norm_forward(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& bias, double eps, bool zero_centered,
                        const at::Tensor& amax = {});

// Recomputes the normalised output from saved statistics (selective recomputation); bit-equal to
// norm_forward's y.
at::Tensor norm_apply(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, const at::Tensor& mean, const at::Tensor& rstd,
                      bool zero_centered);

// Returns dx [..., h] and ACCUMULATES dweight +=, dbias += (fp32 or fp64 [h]; dbias undefined
// without bias). `residual_grad` [..., h], or undefined, is added to dx: the gradient of the
// residual path. The sums over rows are deterministic.
at::Tensor norm_backward(Normalization kind, const at::Tensor& dy, const at::Tensor& x,
                         const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd,
                         bool zero_centered, at::Tensor dweight, at::Tensor dbias,
                         const at::Tensor& residual_grad = {});

}  // namespace megatron
