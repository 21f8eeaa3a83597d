// What attention over a paged cache does before it attends: queries and keys are rotated, keys and
// values are written to the places of their positions in the pool. CUDA only; the same numbers as
// kernels/rotary.h and a copy.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"
#include "megatron/kernels/attention/paged_attention.h"

namespace megatron {

// [rows, groups, heads of a group, features]; strides in elements, features are contiguous.
struct AppendedHeads {
  const void* data = nullptr;  // null: there are none
  int64_t row_stride = 0, group_stride = 0, head_stride = 0;
  int64_t size = 0;  // features
};

struct PagedAppend {
  DType dtype = DType::kFloat32;
  int64_t rows = 0, groups = 0, heads_per_group = 0;
  AppendedHeads query, key, value;  // of keys and values a group has one head
  // [rows, half], fp32 (fp64 for fp64), as in kernels/rotary.h; half = 0: nothing is rotated
  const void *cos = nullptr, *sin = nullptr;
  int64_t angle_stride = 0, half = 0;
  bool interleaved = false;
  // [rows]: block * block_size + offset; a row with a negative one is written nowhere.
  const int64_t* slots = nullptr;
  int64_t block_size = 0;
  PagedPool keys, values;  // assigned where slots say; with a scale rounded to E4M3, saturating
  void* out = nullptr;     // [rows, n, query.size]: rotated queries
};
void paged_append_cuda(const PagedAppend& args, void* stream);

}  // namespace megatron
