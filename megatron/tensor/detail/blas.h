// Products of matrices of bf16 and fp16 through cuBLASLt, fp32 sums to the end; algorithms by Note
// [Choice of algorithms]. Each returns false when it cannot (other types or layouts, or a build
// without CUDA); ATen takes over then.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/quantization.h"

namespace megatron {

// y = x w^T (+ bias) (+ addend).   x [rows, k], w [n, k], bias [n] or undefined, addend and y
// [rows, n].
bool blas_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                  const at::Tensor& addend, const at::Tensor& y);

// dx = dy w (times the derivative of the tanh GELU at gelu_input).   dy [rows, n], w [n, k],
// gelu_input, or undefined, and dx [rows, k].
bool blas_input_grad(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& gelu_input,
                     const at::Tensor& dx);

// target = beta * target + dy^T x.   dy [rows, n], x [rows, k], target [n, k] fp32 contiguous.
bool blas_wide_weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& target,
                           double beta);

// d = beta d + a b^T (+ bias), or with an addend addend + a b^T (+ bias).   a [m, k], b [n, k] in
// FP8 codes, d and addend [m, n] in bf16 or fp32, bias [n] as d or undefined. Dimensions are
// multiples of
// 16. Throws Error where the GPU has no FP8 products.
void blas_quantized(const QuantizedMatrix& a, const QuantizedMatrix& b, const at::Tensor& d,
                    const at::Tensor& bias, const at::Tensor& addend, double beta, bool fast);

// ATen's products of half operands keep fp32 sums to the end (it may split them in the operands'
// type by default). Once per process; nothing in a build without CUDA.
void use_wide_blas_reductions();

}  // namespace megatron
