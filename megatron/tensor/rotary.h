// Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// Rotates the first 2*r features of each head; the others pass through. Differentiable in t;
// computed in fp32 (fp64).
//
//   t         [s, b, n, d]
//   cos, sin  [s, r] or [s, b, r], fp32 (fp64 for fp64 t)
//   interleaved: pairs (0,1), (2,3), ... else halves (0, r), (1, r+1), ...
at::Tensor apply_rotary(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved);

// The same in place, with angles times `sign`; not differentiable.
//
//   t         [s, n * b, heads, d], a view with a contiguous last dimension; n consecutive entries
//             of its second dimension share the angles of one sample
void rotate_(const at::Tensor& t, const at::Tensor& cos, const at::Tensor& sin, bool interleaved,
             double sign);

}  // namespace megatron
