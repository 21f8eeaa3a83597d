// Sums what several ranks hold, in the given order: the local part of a reduction without a
// collective.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

constexpr int kMaxSumParts = 16;

// sum[i] = parts[0][i] + parts[1][i] + ..., in fp32 (fp64 for fp64 parts), rounded to `dtype`.
// target[i] = sum[i], or target[i] + sum[i] with `accumulate`. The target may be one of the parts.
struct SumParts {
  DType dtype = DType::kFloat32;         // type of the parts
  DType target_dtype = DType::kFloat32;  // type of the parts, or fp32
  int num_parts = 0;                     // at most kMaxSumParts
  const void* parts[kMaxSumParts] = {};  // [count] each
  bool accumulate = false;
  void* target = nullptr;  // [count]
  int64_t count = 0;
};
void sum_parts_cpu(const SumParts& sum, int64_t begin, int64_t end);
void sum_parts_cuda(const SumParts& sum, void* stream);

}  // namespace megatron
