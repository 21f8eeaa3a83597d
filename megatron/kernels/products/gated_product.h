// SwiGLU of products of some rows with a large matrix, in one kernel of a Hopper GPU.
#pragma once

#include <cstdint>

namespace megatron {

// out = silu(x w1^T) * (x w2^T) with [w1; w2] = w, in bf16; both products have fp32 sums, in one
// order for any number of rows, and are rounded to bf16 first. Pointers are 16-byte aligned.
struct GatedProduct {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t inner = 0;
  const void* x = nullptr;  // [rows, inner]
  const void* w = nullptr;  // [2 * columns, inner]
  void* out = nullptr;      // [rows, columns]
  // No work that is still queued writes `w`, which is read before that work has ended.
  bool weights_at_rest = false;
};

// Whether the kernel is for a product of these sizes: 33 to kMostGatedRows rows, and columns that
// keep most of the multiprocessors busy once.
constexpr int64_t kMostGatedRows = 128;
bool has_gated_product(const GatedProduct& args);
void gated_product_cuda(const GatedProduct& args, void* stream);

}  // namespace megatron
