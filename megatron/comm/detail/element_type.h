// What the backends on CPUs check of the tensors they get, and the names of element types in
// messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "megatron/base/dtype.h"

namespace megatron {

// "BF16"; libtorch's name for types that we do not store
std::string element_type_name(at::ScalarType type);

// Throws Error unless the tensor lies in host memory, contiguously; returns its element type.
// `what`: the verb.
DType check_cpu_tensor(const char* what, const at::Tensor& tensor);

}  // namespace megatron
