// Activation functions of the MLP, differentiable and fused. Which there are, and how one is added:
// kernels/activation.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/kernels/activation.h"

namespace megatron {

//   x [..., f] ([..., 2f] when gated); return [..., f]. `offset` is used by kQuickGeglu
//   (--glu-linear-offset).
// Saves x only.
at::Tensor activate(const at::Tensor& x, Activation activation, double offset = 0.0);

// The same without autograd, for layers that contain their activation. `amax` [1] fp32, or
// undefined, is raised to the largest magnitude of the result.
at::Tensor activation_forward(const at::Tensor& x, Activation activation, double offset = 0.0,
                              const at::Tensor& amax = {});

// The gradient of x given that of activate(x), for layers that contain their activation. Not
// differentiable.
at::Tensor activation_backward(const at::Tensor& dy, const at::Tensor& x, Activation activation,
                               double offset = 0.0, const at::Tensor& amax = {});

// The same, written to dx, which is shaped like x and contiguous; it may be dy if the activation is
// not gated.
void activation_backward_into(const at::Tensor& dy, const at::Tensor& x, Activation activation,
                              double offset, at::Tensor dx, const at::Tensor& amax = {});

}  // namespace megatron
