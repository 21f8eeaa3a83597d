// Attention of decoding: each query row sees the positions of its sequence, whose keys and values
// lie in blocks of one pool (Kwon et al. 2023, arXiv:2309.06180).
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// Position p of a sequence lies at block_table[p / block_size], offset p % block_size; sequences
// that share the block of a position are equal up to it. The pool is
// [blocks, block_size, g, d]; strides are in elements, features are contiguous.
struct PagedPool {
  const void* data = nullptr;
  int64_t block_stride = 0, position_stride = 0, group_stride = 0;
  // [g]: the pool holds codes of E4M3, to be multiplied by it; null: values of the queries' type.
  const float* scale = nullptr;
};

// out[i] = softmax(scale q[i] k^T) v over positions [lengths[i] - 1 - window_left, lengths[i]), in
// fp32 (fp64 for fp64); the softmax also sums the exponential of the head's sink. A row's result
// depends on no other row's values and not on how the pool is divided; by tiles on a GPU the
// division of its sums depends on the number of rows and on which of its neighbours are of its
// text.
struct PagedAttention {
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t heads = 0, groups = 0;  // n, g; g divides n
  int64_t key_size = 0, value_size = 0;
  double scale = 1.0;
  double softcap = 0.0;         // c > 0: scores become c tanh(score / c)
  int64_t window_left = -1;     // -1: no limit
  const void* sinks = nullptr;  // [n] fp32 (fp64), or null: none
  const void* query = nullptr;  // [rows, n, key_size] contiguous
  PagedPool keys, values;
  int64_t block_size = 0;
  const int32_t* sequences = nullptr;  // [rows]: row of the block table
  const int32_t* lengths = nullptr;    // [rows], at least 1; on a GPU also 0: the row is zero
  const int32_t* block_table = nullptr;
  int64_t table_stride = 0;
  void* out = nullptr;  // [rows, n, value_size], assigned
  // On the CPU alone. [rows]: positions before these are not seen either; null: 0.
  const int32_t* starts = nullptr;
  void* lse = nullptr;  // [rows, n] fp32 (fp64): log sum exp, assigned; null: not wanted
  // By tiles alone: rows are mostly several of a text, positions behind each other, and share tiles
  // of keys. Each row's positions are those of `lengths` in any case.
  bool has_runs = false;
  // By tiles alone. What is read after attention of few rows, which leaves the memory idle: fetched
  // into the L2 cache meanwhile. Aligned to 16 bytes; null: nothing.
  const void* ahead = nullptr;
  int64_t ahead_bytes = 0;
};
// Work items are (row, group) pairs, [rows * g].
void paged_attention_cpu(const PagedAttention& args, int64_t begin, int64_t end);
// Heads of up to kPagedAttentionWidth features.
constexpr int64_t kPagedAttentionWidth = 640;
void paged_attention_cuda(const PagedAttention& args, void* stream);
// By tensor cores of a Hopper GPU, where paged_attention_cuda() can: in bf16 and fp16, keys and
// values of one size up to 256, a multiple of 8 (16 of an FP8 pool), in blocks of a multiple of 16
// positions. Probabilities are rounded to the type of the values.
bool has_paged_tiles(const PagedAttention& args);
void paged_tiles_cuda(const PagedAttention& args, void* stream);

}  // namespace megatron
