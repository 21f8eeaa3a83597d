// Checks that the CPU backends make on tensors, and the names of element types in messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "megatron/base/dtype.h"

namespace megatron {

// "BF16"; libtorch's name for types that we do not store
std::string element_type_name(at::ScalarType type);

// Throws Error unless the tensor is contiguous and in host memory; returns its element type.
// `what`: the collective, for the message.
DType check_cpu_tensor(const char* what, const at::Tensor& tensor);

}  // namespace megatron
