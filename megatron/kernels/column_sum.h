// Sums over rows in a fixed order: blocks of kColumnSumRows rows, then the blocks in order.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

constexpr int64_t kColumnSumRows = 64;

struct ColumnSum {
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t columns = 0;
  const void* x = nullptr;  // [rows, columns]
  void* partial = nullptr;  // [blocks, columns] fp32 (fp64 for fp64 x), assigned
};
void column_sum_cpu(const ColumnSum& sum, int64_t block_begin, int64_t block_end);
void column_sum_cuda(const ColumnSum& sum, void* stream);

// target[c] = beta * target[c] + sum over blocks of partial[block, c]; with beta = 0 the old target
// is not read.
struct PartialSum {
  DType dtype = DType::kFloat32;         // type of partial: fp32 or fp64
  DType target_dtype = DType::kFloat32;  // any floating type
  int64_t blocks = 0;
  int64_t columns = 0;
  const void* partial = nullptr;  // [blocks, columns]
  double beta = 1.0;
  void* target = nullptr;  // [columns]
};
void partial_sum_cpu(const PartialSum& sum, int64_t column_begin, int64_t column_end);
void partial_sum_cuda(const PartialSum& sum, void* stream);

}  // namespace megatron
