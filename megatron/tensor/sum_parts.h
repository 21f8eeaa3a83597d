// Sums tensors in a fixed order, in one pass over memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace megatron {

// target [n] = parts[0] + parts[1] + ..., or with `accumulate` target + that sum. Parts [n] of one
// type, at most kMaxSumParts, contiguous; summed in fp32 (fp64) and rounded to their type. The
// target has that type, or for bf16 parts fp32, and may be one of the parts. On the current stream.
void sum_parts(const std::vector<at::Tensor>& parts, at::Tensor target, bool accumulate);

}  // namespace megatron
