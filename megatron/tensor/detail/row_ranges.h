// Ranges of rows in the place of a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megatron {

// Sample i has counts[i] rows, offsets[i], offsets[i] + step, ... Kernels read them on the device:
// their values may change between replays of a CUDA graph. A sample may have no rows.
struct RowRanges {
  at::Tensor offsets;  // [b + 1] int32
  at::Tensor counts;   // [b] int32
  int64_t most = 0;    // of a sample, at most: what scratch memory is for
  int64_t step = 1;
};

// Keys and values of a sample are those of the same range.
struct QueryKeyRanges {
  RowRanges queries, keys;
};

}  // namespace megatron
