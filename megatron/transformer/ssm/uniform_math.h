// Functions of elements that compute every element by the same code wherever in a tensor it lies.
// On a CPU libtorch's silu, sigmoid and softplus compute the end of a tensor by other code than the
// rest, so that a row's bits would depend on how many rows there are.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

at::Tensor uniform_sigmoid(const at::Tensor& x);
at::Tensor uniform_silu(const at::Tensor& x);
// x above 20, else log(1 + exp(x)).
at::Tensor uniform_softplus(const at::Tensor& x);

}  // namespace megatron
