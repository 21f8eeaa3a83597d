// Products on the CPU by a kernel whose numbers have an order of additions that depends on the
// length of the sum alone (kernels/few_rows_product.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// Whether there are so few rows, and so many weights, that this is faster than BLAS, which packs
// the weights first.
bool is_few_rows(const at::Tensor& x, const at::Tensor& w);

// out = x w^T.   x [rows, k], w [n, k], out [rows, n] contiguous, all fp32 or fp64 on the CPU.
void multiply_rows(const at::Tensor& x, const at::Tensor& w, const at::Tensor& out);

}  // namespace megatron
