// Matrix products of the layers of experts: rows sorted by expert, one weight per expert, in one
// launch. How many rows an expert has is read on the device; the host knows only a bound. Not
// differentiable: the layers write their own backwards.
//
// `counts` [E], int32 or int64 on the operands' device: rows of each expert, 0 allowed. Their sum
// is at most R, the rows of the operands. Rows behind the sum are neither read nor written.
//
// On Hopper GPUs bf16 runs on CUTLASS' pointer-array kernels, without waiting for the device, if n
// and k are multiples of 8. Everything else, and the CPU, is a loop of ATen's products, which on a
// GPU waits for the counts. Sums are in fp32 (fp64 of fp64) and in a fixed order, so results do not
// change from run to run. All operands are contiguous.
//
// On the CPU and in the kernels for Hopper a row's result in the first two products depends neither
// on the rows around it nor on how the rows of an expert are divided over calls. For the CPU the
// calls must say how many rows came `before`: [E] int64 on the CPU, undefined for none.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// y_e = x_e w_e^T.   x [R, k], w [E, n, k], y [R, n] of one type.
void grouped_forward_into(const at::Tensor& x, const at::Tensor& w, const at::Tensor& counts,
                          at::Tensor y, const at::Tensor& before = {});

// dx_e = dy_e w_e.   dy [R, n], w [E, n, k], dx [R, k] of one type.
void grouped_input_grad_into(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& counts,
                             at::Tensor dx, const at::Tensor& before = {});

// target_e = beta * target_e + dy_e^T x_e.   dy [R, n], x [R, k], target [E, n, k] fp32 (fp64 of
// fp64 operands). With beta 0 the target is not read, and zero for an expert without rows.
void grouped_weight_grad(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& counts,
                         at::Tensor target, double beta);

}  // namespace megatron
