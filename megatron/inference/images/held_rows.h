// Rows of a prompt in page-locked memory, from where a GPU reads them at the speed of its link.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

struct HeldRows {
  at::Tensor values;  // GivenRows::values, [count, width], in the model's type
};

}  // namespace megatron
