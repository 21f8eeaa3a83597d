// Positions of a paged cache as rows of one tensor, for attention that knows no pages. CUDA only.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"
#include "megatron/kernels/attention/paged_attention.h"

namespace megatron {

// bf16 and fp16, heads of a multiple of 8 features, pools without gaps that begin at a multiple of
// 16 bytes.
// Codes of E4M3 are multiplied by their scale in fp32 and rounded once.
struct PagedGather {
  DType dtype = DType::kBFloat16;
  int64_t rows = 0, groups = 0;
  int64_t key_size = 0, value_size = 0;
  PagedPool keys, values;
  int64_t block_size = 0;
  const int64_t* places = nullptr;  // [rows]: block * block_size + offset
  void* out_keys = nullptr;         // [rows, groups, key_size], assigned
  void* out_values = nullptr;       // [rows, groups, value_size], assigned
};
void paged_gather_cuda(const PagedGather& args, void* stream);

}  // namespace megatron
