// Gated activations with FP8 output, for a scale that is known beforehand: equal, bit for bit, to
// activation_forward or activation_backward (kernels/activation.h) followed by Fp8Cast
// (kernels/fp8/fp8.h), without the tensor between them.
//
//                                                    bytes moved (bf16)
//   forward    x [rows, 2 f] -> y [rows, f]           6 per element of y
//   backward   x, dy [rows, f] -> dx [rows, 2 f]      5 per element of dx
#pragma once

#include "megatron/kernels/activation.h"
#include "megatron/kernels/fp8/fp8.h"

namespace megatron {

struct Fp8Activation {
  ActivationArgs activation;  // gated; `out` and `amax` are not used
  bool backward = false;
  Fp8Type type = Fp8Type::kE4M3;
  const float* given_scale = nullptr;  // this and the following: see Fp8Cast
  float* new_amax = nullptr;
  float* scale = nullptr;
  uint8_t* in_rows = nullptr;     // [rows, columns] of the result, in FP8
  uint8_t* in_columns = nullptr;  // [columns, rows], or null
};
// Rows and features are multiples of 16 on CUDA, tensors 16-byte aligned.
void fp8_activation_cpu(const Fp8Activation& args, int64_t row_begin, int64_t row_end);
void fp8_activation_cuda(const Fp8Activation& args, void* stream);

struct Fp8BlockActivation {
  ActivationArgs activation;  // gated; `out` and `amax` are not used
  bool backward = false;
  Fp8BlockCast cast;  // of the result, both outputs or in_rows only; `x` is unused, not square
};
// Rows and features are multiples of kFp8Block.
void fp8_block_activation_cpu(const Fp8BlockActivation& args, int64_t block_begin,
                              int64_t block_end);  // blocks of 128 rows
void fp8_block_activation_cuda(const Fp8BlockActivation& args, void* stream);

}  // namespace megatron
