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
};
// Each number has an order of additions that depends on `inner` alone: a row does not depend on
// those beside it.
void few_rows_product_cpu(const FewRowsProduct& args, int64_t column_begin, int64_t column_end);

}  // namespace megatron
