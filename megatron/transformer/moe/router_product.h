// The product of a router: operands in the model's type, sums in fp32 or fp64, and nothing rounded
// in between, since rounded logits tie often.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/nn/parameter.h"

namespace megatron {

// l = x W^T (+ b), differentiable. The weights' gradients go to their store.
//   x       [..., h]
//   weight  [E, h]
//   bias    [E] or null
//   type    of the logits: fp32 or fp64
//   return  [N, E], N the rows of x
at::Tensor router_logits(const at::Tensor& x, Parameter& weight, Parameter* bias,
                         at::ScalarType type);

}  // namespace megatron
