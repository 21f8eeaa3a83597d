// Norms whose result goes straight into FP8 codes, by a scale that is known before: norm_forward
// (kernels/norm.h), then Fp8Cast (kernels/fp8.h), bit for bit, without the tensor between them.
// 6 bytes moved per element (bf16), where the two move 8, of which the L2 cache has a part.
#pragma once

#include "megatron/kernels/fp8.h"
#include "megatron/kernels/norm.h"

namespace megatron {

struct Fp8Norm {
  NormForward norm;  // `y` and `amax` are not used
  Fp8Type type = Fp8Type::kE4M3;
  const float* given_scale = nullptr;  // as of Fp8Cast, and what follows, too
  float* new_amax = nullptr;
  float* scale = nullptr;
  uint8_t* in_rows = nullptr;     // [rows, columns]
  uint8_t* in_columns = nullptr;  // [columns, rows], or null
};
// On CUDA rows and columns are multiples of 16, and tensors are 16-byte aligned.
void fp8_norm_cpu(const Fp8Norm& args, int64_t row_begin, int64_t row_end);
void fp8_norm_cuda(const Fp8Norm& args, void* stream);

}  // namespace megatron
