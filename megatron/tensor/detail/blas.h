// Matrix products of bf16 and fp16 through cuBLASLt, with fp32 accumulation throughout; algorithms
// by Note [Choice of algorithms]. Each returns false if it does not support the operands (other
// types or layouts, or a build without CUDA); the caller then uses ATen.
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

// d = beta d + a b^T (+ bias), or with an addend addend + a b^T (+ bias). a [m, k], b [n, k] in
// FP8, d and addend [m, n] in bf16 or fp32, bias [n] like d or undefined. Dimensions are multiples
// of 16. In batch-invariant mode products by weights with scales by blocks, with sums in 16 bits,
// add in one order. Throws Error if the GPU does not support FP8.
void blas_quantized(const QuantizedMatrix& a, const QuantizedMatrix& b, const at::Tensor& d,
                    const at::Tensor& bias, const at::Tensor& addend, double beta, bool fast);

// Whether products on that GPU take operands with a scale for each row: on Hopper they do.
bool scales_rows_of_products(int device);

// Makes ATen's products of half-precision operands accumulate in fp32 throughout (by default split
// sums may be in the operands' type). Once per process; does nothing in a build without CUDA.
void use_wide_blas_reductions();

}  // namespace megatron
