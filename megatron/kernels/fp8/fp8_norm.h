// Norms with FP8 output, for a scale that is known beforehand: equal, bit for bit, to norm_forward
// (kernels/norm.h) followed by Fp8Cast (kernels/fp8/fp8.h), without the tensor between them. Moves
// 6 bytes per element (bf16) where the two kernels move 8, part of it in the L2 cache.
#pragma once

#include "megatron/kernels/fp8/fp8.h"
#include "megatron/kernels/norm.h"

namespace megatron {

struct Fp8Norm {
  NormForward norm;  // `y` and `amax` are not used
  Fp8Type type = Fp8Type::kE4M3;
  const float* given_scale = nullptr;  // this and the following: see Fp8Cast
  float* new_amax = nullptr;
  float* scale = nullptr;
  uint8_t* in_rows = nullptr;     // [rows, columns]
  uint8_t* in_columns = nullptr;  // [columns, rows], or null
};
// On CUDA rows and columns are multiples of 16, and tensors are 16-byte aligned.
void fp8_norm_cpu(const Fp8Norm& args, int64_t row_begin, int64_t row_end);
void fp8_norm_cuda(const Fp8Norm& args, void* stream);

}  // namespace megatron
