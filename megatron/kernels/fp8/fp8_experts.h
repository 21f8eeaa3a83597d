// Casts of rows that lie by expert to FP8, with scales per expert, in one launch whose sizes lie on
// the device. CUDA alone; elsewhere fp8.h's casts of one expert after the other take their place
// (tensor/experts/grouped_quantization.h), with which results agree to the bit.
#pragma once

#include <cstdint>

#include "megatron/kernels/fp8/fp8.h"

namespace megatron {

// Rows of an expert e are the counts[e] ones behind those of the experts before it; without counts
// every expert has rows / experts. In `in_columns` an expert's rows are padded with zeros to a
// multiple of 16, of blocks 128. Columns are a multiple of 16, of blocks 128; x and the codes are
// 16-byte aligned.
struct Fp8ExpertCast {
  DType dtype = DType::kBFloat16;
  Fp8Type type = Fp8Type::kE4M3;
  int64_t experts = 0;
  int64_t rows = 0;  // of x; at least the sum of the counts, and never exceeded
  int64_t columns = 0;
  const void* counts = nullptr;  // [experts] on the device
  bool wide_counts = false;      // int64 instead of int32
  const void* x = nullptr;       // [rows, columns]
  uint8_t* in_rows = nullptr;    // [rows, columns] or null
  uint8_t* in_columns =
      nullptr;  // of every expert [columns, padded rows], one behind the other; or
                // null

  bool blocks = false;
  // One scale per expert: the given one, unless there is none or it is 0; else from the largest
  // |x| of the expert's rows, which `row_amax` says if it is known.
  const float* given_scale = nullptr;  // [experts], given_stride apart, or null
  int64_t given_stride = 1;
  const float* row_amax = nullptr;  // [rows], or null: the largest |x| of each row
  float* new_amax = nullptr;  // [experts], amax_stride apart, or null: raised to the largest |x|
  int64_t amax_stride = 1;
  float* scale = nullptr;  // [experts, kFp8ScaleElements], assigned

  // Blocks of 128 along the summed dimension; with `square` 128 x 128, which needs no counts.
  // Inverse scales, assigned:
  //   in_rows     of every expert [columns / 128, rows];  square [rows / 128, columns / 128]
  //   in_columns  of every expert [padded rows / 128, columns];  square [columns / 128, rows / 128]
  bool square = false;
  float* row_scales = nullptr;
  float* column_scales = nullptr;

  void* workspace = nullptr;  // fp8_expert_workspace() bytes
};
int64_t fp8_expert_workspace(int64_t experts, int64_t rows);
void fp8_expert_cast_cuda(const Fp8ExpertCast& args, void* stream);
// Raises new_amax alone.
void fp8_expert_amax_cuda(const Fp8ExpertCast& args, void* stream);

}  // namespace megatron
