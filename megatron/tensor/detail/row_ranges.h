// Ranges of rows in the place of a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megatron {

// Sample i has counts[i] rows from row offsets[i] on. Kernels read them on the device: their values
// may change between replays of a CUDA graph.
struct RowRanges {
  at::Tensor offsets;  // [b + 1] int32
  at::Tensor counts;   // [b] int32
  int64_t most = 0;    // of a sample, at most: what scratch memory is for
};

// Keys and values of a sample are those of the same range.
struct QueryKeyRanges {
  RowRanges queries, keys;
};

}  // namespace megatron
