// A gated linear recurrence over the first dimension.
//
//   s_t = a_t s_{t-1} + (1 - a_t) v_t,   elementwise
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

//   a, v     [s, b, n]   the gate, between 0 and 1, and what is read
//   first    [b, n]      s_{-1}; undefined: zeros. Not differentiable
//   return   [s, b, n]   every s_t
// Saves a, v and its output. Source: Martin and Cundy 2018 (arXiv:1709.04057).
at::Tensor gated_scan(const at::Tensor& a, const at::Tensor& v, const at::Tensor& first = {});

}  // namespace megatron
