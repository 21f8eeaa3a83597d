// Products of few rows with a large matrix, which is read once as it lies. BLAS packs it first.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

struct FewRowsProduct {
  DType dtype = DType::kFloat32;  // or fp64
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t inner = 0;
  const void* x = nullptr;  // [rows, inner]
  const void* w = nullptr;  // [columns, inner]
  void* out = nullptr;      // [rows, columns] = x w^T
  // On a GPU alone, null or false: without.
  const void* bias = nullptr;    // [columns], added
  const void* addend = nullptr;  // [rows, columns], added
  const void* gain = nullptr;    // [inner]: x is RMSNorm(x) first, rounded to `dtype`
  double eps = 0.0;
  bool zero_centered = false;  // the norm's factors are 1 + gain
  // out = silu(x w1^T) * (x w2^T) with [w1; w2] = w, [2 * columns, inner], both rounded to `dtype`;
  // without bias and addend.
  bool swiglu = false;
  // `w` holds codes of E4M3, to be multiplied by *w_scale or, with a stride, by the scale of each
  // 128 x 128 of them: w_scale[row / 128 * w_scale_stride + k / 128]. Null: values of `dtype`.
  const float* w_scale = nullptr;
  int64_t w_scale_stride = 0;
  // No work that is still queued writes `w` and `gain`, which are read before that work has ended.
  bool weights_at_rest = false;
};
// Each number has an order of additions that depends on `inner` alone: a row does not depend on
// those beside it.
void few_rows_product_cpu(const FewRowsProduct& args, int64_t column_begin, int64_t column_end);

// The same on a Hopper GPU, in bf16 and fp16 with fp32 sums: up to kMostRowsOnGpu rows of a
// multiple of 8 elements (16 with codes), 16-byte aligned. With codes x is not rounded to FP8: with
// few rows only the weights' bytes count.
constexpr int64_t kMostRowsOnGpu = 4;
bool has_few_rows_product(const FewRowsProduct& args);
void few_rows_product_cuda(const FewRowsProduct& args, void* stream);

}  // namespace megatron
