// Gated activations whose result goes straight into FP8 codes, by a scale that is known before:
// activation_forward or activation_backward (kernels/activation.h), then Fp8Cast (kernels/fp8.h),
// bit for bit, without the tensor between them.
//
//   forward    x [rows, 2 f] -> codes of y [rows, f]               6 bytes moved per element of y
//   (bf16) backward   x, dy [rows, f] -> codes of dx [rows, 2 f]          5 per element of dx
#pragma once

#include "megatron/kernels/activation.h"
#include "megatron/kernels/fp8.h"

namespace megatron {

struct Fp8Activation {
  ActivationArgs activation;  // gated; `out` and `amax` are not used
  bool backward = false;
  Fp8Type type = Fp8Type::kE4M3;
  const float* given_scale = nullptr;  // as of Fp8Cast, and what follows, too
  float* new_amax = nullptr;
  float* scale = nullptr;
  uint8_t* in_rows = nullptr;     // [rows, columns] of the result
  uint8_t* in_columns = nullptr;  // [columns, rows], or null
};
// Rows and features are multiples of 16 on CUDA, tensors 16-byte aligned.
void fp8_activation_cpu(const Fp8Activation& args, int64_t row_begin, int64_t row_end);
void fp8_activation_cuda(const Fp8Activation& args, void* stream);

struct Fp8BlockActivation {
  ActivationArgs activation;  // gated; `out` and `amax` are not used
  bool backward = false;
  Fp8BlockCast cast;  // of the result, in both orientations or in rows; `x` is not used, not square
};
// Rows and features are multiples of kFp8Block.
void fp8_block_activation_cpu(const Fp8BlockActivation& args, int64_t block_begin,
                              int64_t block_end);  // of 128 rows
void fp8_block_activation_cuda(const Fp8BlockActivation& args, void* stream);

}  // namespace megatron
