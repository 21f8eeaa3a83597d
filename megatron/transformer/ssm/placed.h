// Gradients that a caller has a place for, such as a part of the gradient of wider rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// `gradient`, copied into `place` unless it is that tensor; an undefined place wants nothing.
inline at::Tensor placed(const at::Tensor& gradient, const at::Tensor& place) {
  if (!place.defined() || place.is_same(gradient)) return gradient;
  return place.copy_(gradient);
}

}  // namespace megatron
