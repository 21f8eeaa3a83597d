// The kernel of attention over pages (kernels/attention/paged_attention.h) on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/tensor/attention/paged_attention.h"

namespace megatron {

// As kernels read a cache for rows of queries.
PagedPool pool_of(const PagedView& view, const at::Tensor& rows);

// What each row sees, int32: positions [starts, lengths) of its sequence, which lie in the blocks
// of that row of the table.
struct PagedTables {
  at::Tensor sequences, lengths;  // [rows]
  at::Tensor block_table;         // [sequences, most blocks]
  int64_t block_size = 0;
  int64_t positions = 0;   // that a row sees, about: for the division over threads
  at::Tensor starts = {};  // [rows], on the CPU alone; undefined: 0
  at::Tensor ahead = {};   // see PagedAttention::ahead; undefined: nothing
  bool has_runs = false;   // see PagedAttention::has_runs
};

// q [rows, n, d] -> [rows, n, v]. `lse` [rows, n] fp32 (fp64), unless undefined, is assigned; on
// the CPU alone.
at::Tensor attend_rows(const at::Tensor& q, const PagedView& keys, const PagedView& values,
                       const PagedTables& tables, const AttentionOptions& options,
                       const at::Tensor& lse = {});

}  // namespace megatron
