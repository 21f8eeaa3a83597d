// Weights held in 8-bit integers on a CPU, and products with them: see
// kernels/int8/int8_product.h. Not differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megatron {

struct Int8Weight {
  at::Tensor panels;  // [panels, bytes of a panel] int8
  at::Tensor scales;  // [outputs] fp32
  int64_t outputs = 0, inner = 0;
  bool defined() const { return panels.defined(); }
};

// `weight` [outputs, inner], any floating type, on a CPU.
Int8Weight to_int8(const at::Tensor& weight);
// Bytes of a weight of this shape in 8 bits.
int64_t int8_bytes(int64_t outputs, int64_t inner);

// x w^T (+ bias) (+ addend). x [..., inner] is rounded to 8 bits with a scale for each row; bias
// [outputs] and addend [..., outputs], or undefined. Returns [..., outputs] in the type of x.
at::Tensor int8_product(const at::Tensor& x, const Int8Weight& weight, const at::Tensor& bias,
                        const at::Tensor& addend);

}  // namespace megatron
