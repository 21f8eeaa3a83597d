// Products of many pairs of FP8 matrices in one launch, whose sizes lie on the device; CUDA alone,
// with fp32 sums (tensor/experts/grouped_quantization.h). Operands are as fp8_expert_cast_cuda()
// writes them: both lie along the summed dimension.
#pragma once

#include <cstdint>

#include "megatron/kernels/fp8/fp8.h"

namespace megatron {

// Rows of an expert e are the counts[e] ones behind those of the experts before it.
//   rows          d [rows, n] = a [rows, k] b_e [n, k]^T                      d bf16
//   weight_grad   d_e [n, k] = beta d_e + a_e [n, padded] b_e [k, padded]^T   d fp32
// with rows padded to a multiple of 16, of blocks 128. n and k are multiples of 16, of blocks 128;
// addresses of 16 bytes. b is E4M3.
struct GroupedGemmFp8 {
  bool weight_grad = false;
  Fp8Type a_type = Fp8Type::kE4M3;
  bool blocks = false;
  // Without blocks: partial sums in the tensor cores' reduced precision (quantized_product()).
  bool fast = false;
  int64_t experts = 0;
  int64_t rows = 0;  // at least the sum of the counts, and never exceeded
  int64_t n = 0;
  int64_t k = 0;
  const void* counts = nullptr;  // [experts] on the device
  bool wide_counts = false;      // int64 instead of int32
  const uint8_t* a = nullptr;
  const uint8_t* b = nullptr;
  // Of an expert kFp8ScaleElements, whose inverse counts. Blocks, inverse scales: a [k / 128, rows]
  // of every expert, b [n / 128, k / 128] of every expert; of weight gradients [padded / 128, n]
  // and [padded / 128, k].
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
  void* d = nullptr;
  float beta = 0.0f;          // weight gradients only; with 0 the old d is not read
  void* workspace = nullptr;  // grouped_gemm_fp8_workspace() bytes
};

// On devices of has_grouped_gemm() (grouped_gemm.h). Deterministic: an element is one sum in the
// order of its terms.
int64_t grouped_gemm_fp8_workspace(int64_t experts);
void grouped_gemm_fp8_cuda(const GroupedGemmFp8& gemm, void* stream);

}  // namespace megatron
