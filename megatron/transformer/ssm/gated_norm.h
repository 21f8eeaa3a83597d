// RMSNorm over groups of neighbouring channels after a gate, and its backward:
//
//   v = y silu(z),   o = w v rstd,   rstd = 1 / sqrt(mean(v^2) + eps) per token and group
//
// Computed in fp32 (fp64 for fp64).
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

class ProcessGroup;

// The groups of this rank's channels.
struct NormGroups {
  int64_t count = 1;  // 1 where several ranks hold one group
  // The ranks that hold one group: sums over its channels are added in the order of the ranks, one
  // all-gather of [s, b] in the forward and one in the backward. Null: this rank alone.
  const ProcessGroup* shared = nullptr;
  double eps = 1e-5;
};

struct GatedNormResult {
  at::Tensor o;     // [s, b, d] as y
  at::Tensor rstd;  // [s, b, count] fp32 (fp64)
};
//   y, z [s, b, d] with any strides, w [d]
GatedNormResult gated_norm(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                           const NormGroups& groups);

// o again from the statistics, with the same bits.
at::Tensor gated_norm_apply(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                            const at::Tensor& rstd);

struct GatedNormGrads {
  at::Tensor y, z;  // as y, z
  at::Tensor w;     // [d] fp32 (fp64)
};
// `dz`: where the gradient of z is written; undefined: it is made.
GatedNormGrads gated_norm_backward(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& z,
                                   const at::Tensor& w, const at::Tensor& rstd,
                                   const NormGroups& groups, const at::Tensor& dz = {});

}  // namespace megatron
