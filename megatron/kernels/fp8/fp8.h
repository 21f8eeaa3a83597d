// Casts of tensors to FP8, and their scales. A value x is stored as round(x * scale), saturating at
// the largest finite value; products are multiplied with the inverse scales.
//
// Products on Hopper read both operands along the summed dimension, so an operand is written
// row-major, transposed, or both, in one pass over x. Maxima are exact in any order: everything
// here is bit-reproducible and equal on the CPU and CUDA.
//
// Follows Transformer Engine: Micikevicius et al. 2022 (arXiv:2209.05433) for the formats and
// delayed scaling; DeepSeek-V3 (arXiv:2412.19437) section 3.3 for blocks.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"
#include "megatron/kernels/detail/math.h"

namespace megatron {

enum class Fp8Type : uint8_t { kE4M3, kE5M2 };
MEGATRON_HOST_DEVICE constexpr float largest_of(Fp8Type type) {
  return type == Fp8Type::kE4M3 ? 448.0f : 57344.0f;
}

// amax = max(amax, largest |x|); NaN is ignored.
struct Amax {
  DType dtype = DType::kBFloat16;
  int64_t count = 0;
  const void* x = nullptr;  // [count], 16-byte aligned on CUDA
  float* amax = nullptr;    // [1], not negative
};
constexpr int64_t kAmaxRun = 4096;  // elements per range of the CPU version
void amax_cpu(const Amax& args, int64_t run_begin, int64_t run_end);
void amax_cuda(const Amax& args, void* stream);

// A scale and its inverse, with padding between them: cuBLASLt reads inverse scales 16 bytes at a
// time.
constexpr int64_t kFp8InverseAt = 4, kFp8ScaleElements = 8;

// One scale for the tensor. Reads 2 bytes per element (bf16), writes 1 per element and output.
// On CUDA rows and columns are multiples of 16 and tensors 16-byte aligned.
struct Fp8Cast {
  DType dtype = DType::kBFloat16;
  Fp8Type type = Fp8Type::kE4M3;
  int64_t rows = 0;
  int64_t columns = 0;
  const void* x = nullptr;             // [rows, columns]
  const float* amax = nullptr;         // [1]: the scale is fp8_scale(amax); or
  const float* given_scale = nullptr;  // [1]: the scale itself, 1 if it is 0
  float* new_amax = nullptr;           // [1] or null: raised to the largest |x|
  // [kFp8ScaleElements], assigned: the scale, and its inverse at kFp8InverseAt
  float* scale = nullptr;
  uint8_t* in_rows = nullptr;     // [rows, columns] or null, assigned
  uint8_t* in_columns = nullptr;  // [columns, rows] or null, assigned
};
void fp8_cast_cpu(const Fp8Cast& args, int64_t row_begin, int64_t row_end);
void fp8_cast_cuda(const Fp8Cast& args, void* stream);

// A power-of-two scale per block: blocks of 128 along the summed dimension (in_rows: along a row of
// x; in_columns: along a column), or with `square` 128 x 128. Rows and columns are multiples of
// kFp8Block.
constexpr int64_t kFp8Block = 128;
struct Fp8BlockCast {
  DType dtype = DType::kBFloat16;
  Fp8Type type = Fp8Type::kE4M3;
  bool square = false;
  int64_t rows = 0;
  int64_t columns = 0;
  const void* x = nullptr;        // [rows, columns]
  uint8_t* in_rows = nullptr;     // [rows, columns] or null, assigned
  uint8_t* in_columns = nullptr;  // [columns, rows] or null, assigned
  // Inverse scales, assigned, in the layouts that cuBLASLt reads:
  //   in_rows      [columns / 128, rows];  square: [rows / 128, up4(columns / 128)]
  //   in_columns   [rows / 128, columns];  square: [columns / 128, up4(rows / 128)]
  // with up4 rounding up to a multiple of 4; padding is not written.
  float* row_scales = nullptr;
  float* column_scales = nullptr;
};
MEGATRON_HOST_DEVICE constexpr int64_t up4(int64_t n) { return (n + 3) / 4 * 4; }
void fp8_block_cast_cpu(const Fp8BlockCast& args, int64_t block_begin,
                        int64_t block_end);  // blocks of 128 rows
void fp8_block_cast_cuda(const Fp8BlockCast& args, void* stream);

// End of a step of delayed scaling: appends the step's amax to the history, computes the scale from
// the history (scale = largest / amax * factor) and resets the amax to 0. A scale is kept if the
// history gives none (0 or not finite).
struct DelayedScaleUpdate {
  int64_t slots = 0;  // three per weight: input, weight and output gradient
  int64_t history_length = 1;
  bool most_recent = true;       // use the latest amax; else the largest of the history
  bool keep_unmeasured = false;  // a slot whose amax is 0 stays as it is, history and scale
  float factor = 1.0f;           // 2^-margin
  Fp8Type gradient_type = Fp8Type::kE5M2;
  float* state = nullptr;  // [slots, 1 + history_length]: the scale, then amax values, newest first
  float* amax = nullptr;   // [slots]
};
void delayed_scale_update_cpu(const DelayedScaleUpdate& args);
void delayed_scale_update_cuda(const DelayedScaleUpdate& args, void* stream);

}  // namespace megatron
