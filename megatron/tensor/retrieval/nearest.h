// Which vectors may be among the nearest (kernels/retrieval/nearest.h), on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/kernels/retrieval/nearest.h"

namespace megatron {

struct CandidateLists {
  // Empty ones.
  CandidateLists(int64_t queries, int64_t capacity, c10::Device device);
  int64_t most() const;  // candidates of a query that were found, kept or not; waits for the device
  int64_t capacity() const { return rows.size(1); }
  Candidates pointers() const;

  at::Tensor lower, upper;  // [queries, capacity] fp32
  at::Tensor rows;          // [queries, capacity] int32
  at::Tensor counts;        // [queries] int32
};

// Bounds of queries, and of the vectors of a product's columns, fp32 [queries], [columns].
struct QueryBounds {
  at::Tensor norms, errors, limits;
};
struct VectorBounds {
  at::Tensor squares, errors, norms;
};

// `products` [queries, columns] contiguous, of columns that are rows `first_row`... of the vectors.
void scan_candidates(const at::Tensor& products, int64_t first_row, const QueryBounds& queries,
                     const VectorBounds& columns, double rounding, CandidateLists& out);

// Those whose lower bound is not above the limit of their query.
CandidateLists filter_candidates(const CandidateLists& from, const at::Tensor& limits);

// Squared distances [queries, capacity] fp64 of candidates, infinite where there is none.
// `queries`, `vectors` [..., width] fp32.
at::Tensor candidate_distances(const CandidateLists& candidates, const at::Tensor& queries,
                               const at::Tensor& vectors);

}  // namespace megatron
