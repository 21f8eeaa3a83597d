// What kernels that load 16 bytes at once ask of a paged cache.
#pragma once

#include "megatron/kernels/attention/paged_attention.h"

namespace megatron {

// Whether every head of every position of the pool begins at a multiple of 16 bytes.
inline bool has_aligned_heads(const PagedPool& pool) {
  const int64_t elements = pool.scale != nullptr ? 16 : 8;
  return reinterpret_cast<uintptr_t>(pool.data) % 16 == 0 && pool.block_stride % elements == 0 &&
         pool.position_stride % elements == 0 && pool.group_stride % elements == 0;
}

}  // namespace megatron
