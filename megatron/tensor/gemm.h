// Matrix products of linear layers, with fp32 accumulation for all operand types; on CUDA through
// cuBLASLt. Not differentiable: the layers write their own backwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace megatron {

struct AroundProduct;

// From now on, times cuBLASLt's candidates for each large bf16 or fp16 product at its first use and
// keeps the choices in a file in `folder`. Empty, the default: the library's first choice. No
// effect on the CPU.
void tune_gemms(const std::string& folder);

// Choosing a kernel takes cuBLASLt milliseconds, and timing candidates tenths of a second, which is
// too long for every number of rows of images and requests. So numbers of rows share the choice for
// a larger one, of which there are four in an octave: this one.
int64_t rows_of_choice(int64_t rows);
// How often cuBLASLt was asked for kernels.
int64_t gemm_choices();

// y = x w^T (+ bias) (+ addend).   x [..., k], w [n, k], bias [n] or undefined, addend [..., n] of
// x's type or undefined; returns [..., n]. On CUDA the sum is rounded once. `at_rest`: no work that
// is still queued writes `w`, which may be read before that work has ended.
at::Tensor linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                          const at::Tensor& addend = {}, bool at_rest = false);

// The same with what lies around a product of few rows on a GPU, in one kernel (AroundProduct,
// tensor/batch_invariant/row_products.h); y [..., n], with swiglu [..., n / 2]. Undefined where no
// kernel does just this.
at::Tensor fused_linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                                const AroundProduct& around);

// dx = dy w. dy [..., n], w [n, k]; returns [..., k]. With `gelu_input` [..., k] of dy's type:
// multiplied by the derivative of Activation::kGeluTanh at gelu_input, which gives the gradient
// with respect to gelu_input. On CUDA in the product's epilogue.
at::Tensor linear_input_grad(const at::Tensor& dy, const at::Tensor& w,
                             const at::Tensor& gelu_input = {});

// The same, written to y [..., n] and dx [..., k], contiguous and of the operands' type.
void linear_forward_into(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                         at::Tensor y, const at::Tensor& addend = {}, bool at_rest = false);
void linear_input_grad_into(const at::Tensor& dy, const at::Tensor& w, at::Tensor dx,
                            const at::Tensor& gelu_input = {});

// target = beta * target + dy^T x.   dy [..., n], x [..., k], target [n, k], fp32 (or the operands'
// type).
void linear_weight_grad(const at::Tensor& dy, const at::Tensor& x, at::Tensor target, double beta);

// target = beta * target + sum of dy over all but the last dimension.   target [n].
void bias_grad(const at::Tensor& dy, at::Tensor target, double beta);

}  // namespace megatron
