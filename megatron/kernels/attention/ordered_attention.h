// Attention of a GPU whose sums have one order: a row's bits depend on its query, on the keys and
// values that it sees and on their positions, not on the rows beside it, on how many rows there
// are, or on how a pool is divided. For batch-invariant mode: the same numbers when a text is
// trained on, read as a prompt in chunks and decoded.
//
// Source: Dao 2023, "FlashAttention-2" (arXiv:2307.08691), with splits of fixed lengths as in
// He 2025, "Defeating Nondeterminism in LLM Inference".
#pragma once

#include "megatron/kernels/attention/paged_attention.h"

namespace megatron {

// out = softmax(scale q k^T) v over the positions from p - window_left to p, where p is the
// position of the row. Keys and values lie in a pool's blocks, which may be one block per sequence
// of any size.
struct OrderedAttention {
  DType dtype = DType::kBFloat16;  // or fp16
  int64_t heads = 0, groups = 0;   // n, g; g divides n
  int64_t size = 0;                // of a head
  double scale = 1.0;
  double softcap = 0.0;      // c > 0: scores become c tanh(score / c)
  int64_t window_left = -1;  // -1: no limit
  // Strides in elements, features contiguous. Row i of sequence p lies at p part + i row.
  const void* query = nullptr;
  int64_t query_part = 0, query_row = 0, query_head = 0;
  void* out = nullptr;  // assigned
  int64_t out_part = 0, out_row = 0, out_head = 0;
  // fp32, [sequences, n, count], of sequences with equally many rows: log sum exp; null: not wanted
  float* lse = nullptr;
  PagedPool keys, values;
  int64_t block_size = 0;
  const int32_t* block_table = nullptr;  // a row per sequence
  int64_t table_stride = 0;

  int64_t sequences = 0;
  // One row per sequence, decoding: [sequences] positions that it sees, its own included; 0: the
  // row becomes zero. Null: several rows.
  const int32_t* lengths = nullptr;
  // Several rows: `count` of each sequence, of which the first lies at position `start`; or, if
  // `spans` is not null, [num_spans] of consecutive rows, at most span_rows() each: the sequence's
  // row of the table, the first row, their number, the position of the first.
  int64_t count = 0, start = 0;
  const int32_t* spans = nullptr;
  int64_t num_spans = 0;
};

// Rows of one tile: a span has no more.
int64_t ordered_span_rows(int64_t heads, int64_t groups);
// Hopper, bf16 or fp16, at most 128 features, a multiple of 8; a group of at most 128 heads; blocks
// of a multiple of 16 positions, or one per sequence.
bool has_ordered_attention(const OrderedAttention& args);
void ordered_attention_cuda(const OrderedAttention& args, void* stream);

}  // namespace megatron
