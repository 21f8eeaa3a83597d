// cuBLASLt where ATen has no entry point: half operands accumulated into an fp32 target.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// target = beta * target + dy^T x on CUDA.   dy [rows, n] and x [rows, k] bf16 or fp16, target [n, k] fp32 contiguous.
// Returns false when it cannot (other types or layouts, or a build without CUDA).
bool blas_wide_weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& target, double beta);

// ATen's products of half operands keep fp32 sums to the end (it may split them in the operands' type by default). Once
// per process; nothing in a build without CUDA.
void use_wide_blas_reductions();

}  // namespace megatron
