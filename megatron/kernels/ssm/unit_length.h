// Rows of heads scaled to length 1, as the gated delta rule takes its queries and keys, and the
// backward, in bf16 with sums in fp32:
//
//   y = x r,  r = 1 / sqrt(sum of x^2 + epsilon);   dx = r (dy - y (y . dy))
#pragma once

#include "megatron/kernels/ssm/scan_rows.h"

namespace megatron {

struct UnitLengthArgs {
  int64_t tokens = 0, samples = 1, heads = 1, size = 0;
  float epsilon = 1e-6f;
  ScanRows x, y;    // [heads, size]; 16-byte aligned, strides multiples of 8
  ScanRows dy, dx;  // the backward's, which does not take y
};

constexpr bool unit_length_supports(int64_t size) { return size == 64 || size == 128; }
void unit_length_forward_cuda(const UnitLengthArgs& args, void* stream);
void unit_length_backward_cuda(const UnitLengthArgs& args, void* stream);

}  // namespace megatron
