// Products of few rows by kernels of our own (kernels/few_rows_product.h); on the CPU one whose
// numbers have an order of additions that depends on the length of the sum alone.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/quantization.h"

namespace megatron {

// Whether there are so few rows, and so many weights, that this is faster than BLAS, which packs
// the weights first.
bool is_few_rows(const at::Tensor& x, const at::Tensor& w);

// out = x w^T.   x [rows, k], w [n, k], out [rows, n] contiguous, all fp32 or fp64 on the CPU.
void multiply_rows(const at::Tensor& x, const at::Tensor& w, const at::Tensor& out);

// What a product of few rows computes besides: an RMSNorm of x, SwiGLU of the product.
struct AroundProduct {
  at::Tensor gain = {};  // [k]; undefined: no norm
  double eps = 0.0;
  bool zero_centered = false;  // its factors are 1 + gain
  bool swiglu = false;         // out [rows, n / 2]; no bias and no addend
};

// out = x w^T + bias + addend on a GPU, where its kernel supports exactly this: up to four rows in
// bf16 or fp16 on Hopper. Else false, and nothing was done. `bias` and `addend` may be undefined;
// `at_rest`: see linear_forward().
bool multiply_few_rows(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                       const at::Tensor& addend, const at::Tensor& out, bool at_rest,
                       const AroundProduct& around = {});

// The same with a weight of E4M3 codes, with one scale or one for each 128 x 128 of them. x is not
// quantised.
bool multiply_few_rows(const at::Tensor& x, const QuantizedMatrix& w, const at::Tensor& bias,
                       const at::Tensor& addend, const at::Tensor& out, bool at_rest,
                       const AroundProduct& around = {});

// Whether multiply_gated_rows() is for such products: of some dozens of rows, by a weight at rest.
bool is_gated_rows(const at::Tensor& x, const at::Tensor& w);
// SwiGLU of x w^T by one kernel of a GPU (kernels/products/gated_product.h): [..., n / 2].
//   x [..., k], w [n, k] bf16 contiguous
at::Tensor multiply_gated_rows(const at::Tensor& x, const at::Tensor& w);

// at::matmul(a, b) of matrices in the last two dimensions; in batch-invariant mode by the kernel
// above, so that a number's bits depend on the lengths of its sum alone, whatever shares the batch.
//   a [..., m, k], b [..., k, n], whose dimensions before are broadcast
at::Tensor multiply_matrices(const at::Tensor& a, const at::Tensor& b);

// (I + a)^-1 x for a [..., q, q], of which what lies below the diagonal is read, and x [..., q, n];
// in batch-invariant mode row by row, each from all q rows, of which those not yet known are zero.
at::Tensor solve_unit_lower(const at::Tensor& a, const at::Tensor& x);

}  // namespace megatron
