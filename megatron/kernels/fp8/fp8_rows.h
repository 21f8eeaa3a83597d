// Casts to E4M3 with a scale for each row, fp8_power_of_two_scale() of its largest |value|, in one
// pass: of rows as they are, of a norm of them, or of a gated activation of them. What becomes of a
// row stays in registers until its largest value is known. Being powers of two, scales of rows may
// be applied before a product is rounded or after it, which gives the same bits. Codes and scales
// are those of the norm or activation as a kernel of its own (kernels/norm.h,
// kernels/activation.h), rounded to the type of x, and the cast; a norm adds up a row in another
// order.
//
//                                        bytes moved (bf16)
//   values      x [rows, c] -> [rows, c]          3 per element
//   norm        x [rows, c] -> [rows, c]          3
//   activation  x [rows, 2 c] -> [rows, c]        5
//
// For products of forwards without a backward, whose operands need no transposed codes. Scales for
// each token: Xiao et al. 2023 (arXiv:2211.10438).
#pragma once

#include "megatron/kernels/activation.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/kernels/norm.h"

namespace megatron {

enum class Fp8RowsOf : uint8_t { kValues, kNorm, kActivation };

struct Fp8Rows {
  Fp8RowsOf of = Fp8RowsOf::kValues;
  DType dtype = DType::kBFloat16;
  int64_t rows = 0;
  int64_t columns = 0;
  const void* x = nullptr;  // [rows, columns]; of an activation [rows, 2 columns]
  // [rows] or null: powers of two by which rows of x are multiplied first
  const float* factors = nullptr;
  // Of a norm; its dtype, rows, columns, x, y, statistics and amax are not used.
  NormForward norm = {};
  // Of a gated activation; its dtype, rows, features, x, dy, out and amax are not used.
  ActivationArgs activation = {};
  uint8_t* codes = nullptr;         // [rows, columns], assigned
  float* inverse_scales = nullptr;  // [rows], assigned
};
// On CUDA: rows of a multiple of 16 columns, at most kMostFp8RowColumns; tensors 16-byte aligned.
constexpr int64_t kMostFp8RowColumns = 65536;
void fp8_rows_cpu(const Fp8Rows& args, int64_t row_begin, int64_t row_end);
void fp8_rows_cuda(const Fp8Rows& args, void* stream);

// y = y * factors (+ bias) (+ addend), rows of a product whose scales were left out of it, rounded
// once. Powers of two as factors, without bias and addend, round nothing.
struct RowFactors {
  DType dtype = DType::kBFloat16;
  int64_t rows = 0;
  int64_t columns = 0;             // a multiple of 8; rows are 16-byte aligned
  void* y = nullptr;               // [rows, columns]
  const float* factors = nullptr;  // [rows]
  const void* bias = nullptr;      // [columns] or null
  const void* addend = nullptr;    // [rows, columns] or null; not `y`
};
void row_factors_cuda(const RowFactors& args, void* stream);

}  // namespace megatron
