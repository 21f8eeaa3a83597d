// Checks of shapes and element types on entry of public functions: documented shapes are checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string_view>

#include "megatron/base/dtype.h"

namespace megatron {

// Throws InternalError "internal error: <what> has shape [..], expected [..]" unless the shapes
// agree; -1 matches any size.
void check_shape(std::string_view what, const at::Tensor& tensor,
                 std::initializer_list<int64_t> expected);

at::ScalarType to_scalar_type(DType dtype);
DType to_dtype(at::ScalarType type);  // throws InternalError for types that we do not store

// fp64 for fp64, else fp32: the type in which kernels compute and keep statistics.
at::ScalarType accumulate_type(const at::Tensor& tensor);

}  // namespace megatron
