// Sums over rows in a fixed order (kernels/column_sum.h), on tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// target = beta * target + partial.sum(0), in order.   partial [blocks, n] fp32 or fp64; target
// [n], contiguous, any floating type.
void add_partial_sums(const at::Tensor& partial, double beta, at::Tensor target);

}  // namespace megatron
