// The documents that are packed in sequences, one by one: where the chunks of a scan are to begin
// with each of them, not with the sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace megatron {

struct DocumentRows {
  int64_t sequence = 0, first = 0, count = 0;
  // x [s, b, ...] -> [count, 1, ...], a view
  at::Tensor of(const at::Tensor& x) const;
};

// Of `runs` [s, b], document_runs() (causal_conv.h), sequence by sequence.
std::vector<DocumentRows> document_rows(const at::Tensor& runs);

}  // namespace megatron
