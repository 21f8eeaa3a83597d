#include "megatron/tensor/retrieval/nearest.h"

#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

CandidateLists::CandidateLists(int64_t queries, int64_t capacity, c10::Device device) {
  const at::TensorOptions options = at::TensorOptions().device(device);
  lower = at::empty({queries, capacity}, options.dtype(at::kFloat));
  upper = at::full({queries, capacity}, kInfinity, options.dtype(at::kFloat));
  rows = at::empty({queries, capacity}, options.dtype(at::kInt));
  counts = at::zeros({queries}, options.dtype(at::kInt));
}

int64_t CandidateLists::most() const { return counts.max().item<int32_t>(); }

Candidates CandidateLists::pointers() const {
  return {lower.data_ptr<float>(), upper.data_ptr<float>(), rows.data_ptr<int32_t>(),
          counts.data_ptr<int32_t>(), capacity()};
}

void scan_candidates(const at::Tensor& products, int64_t first_row, const QueryBounds& queries,
                     const VectorBounds& columns, double rounding, CandidateLists& out) {
  CandidateScan scan;
  scan.queries = products.size(0);
  scan.columns = products.size(1);
  MEGATRON_ASSERT(products.is_contiguous(), "products of a scan are contiguous");
  for (const at::Tensor& x : {queries.norms, queries.errors, queries.limits})
    check_shape("bounds of queries", x, {scan.queries});
  for (const at::Tensor& x : {columns.squares, columns.errors, columns.norms})
    check_shape("bounds of vectors", x, {scan.columns});
  check_shape("candidates", out.counts, {scan.queries});
  scan.dtype = to_dtype(products.scalar_type());
  scan.products = products.const_data_ptr();
  scan.first_row = static_cast<int32_t>(first_row);
  scan.query_norms = queries.norms.const_data_ptr<float>();
  scan.query_errors = queries.errors.const_data_ptr<float>();
  scan.limits = queries.limits.const_data_ptr<float>();
  scan.squares = columns.squares.const_data_ptr<float>();
  scan.errors = columns.errors.const_data_ptr<float>();
  scan.norms = columns.norms.const_data_ptr<float>();
  scan.rounding = static_cast<float>(rounding);
  scan.out = out.pointers();
  launch(
      products, scan.queries, scan.columns,
      [&](int64_t begin, int64_t end) { scan_candidates_cpu(scan, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(scan_candidates_cuda(scan, stream)); });
}

CandidateLists filter_candidates(const CandidateLists& from, const at::Tensor& limits) {
  CandidateLists to(from.counts.size(0), from.capacity(), from.counts.device());
  CandidateFilter filter;
  filter.from = from.pointers();
  filter.to = to.pointers();
  filter.queries = from.counts.size(0);
  check_shape("limits", limits, {filter.queries});
  filter.limits = limits.const_data_ptr<float>();
  launch(
      limits, filter.queries, from.capacity(),
      [&](int64_t begin, int64_t end) { filter_candidates_cpu(filter, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(filter_candidates_cuda(filter, stream)); });
  return to;
}

at::Tensor candidate_distances(const CandidateLists& candidates, const at::Tensor& queries,
                               const at::Tensor& vectors) {
  MEGATRON_ASSERT(queries.is_contiguous() && vectors.is_contiguous() &&
                      queries.scalar_type() == at::kFloat && vectors.scalar_type() == at::kFloat,
                  "distances of fp32 vectors");
  PairDistances pairs;
  pairs.num_queries = queries.size(0);
  pairs.width = queries.size(1);
  check_shape("vectors", vectors, {vectors.size(0), pairs.width});
  at::Tensor out =
      at::full(candidates.rows.sizes(), kInfinity, queries.options().dtype(at::kDouble));
  const Candidates all = candidates.pointers();
  pairs.queries = queries.const_data_ptr<float>();
  pairs.vectors = vectors.const_data_ptr<float>();
  pairs.rows = all.rows;
  pairs.counts = all.counts;
  pairs.capacity = all.capacity;
  pairs.out = out.data_ptr<double>();
  launch(
      queries, pairs.num_queries, pairs.width * all.capacity,
      [&](int64_t begin, int64_t end) { pair_distances_cpu(pairs, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(pair_distances_cuda(pairs, stream)); });
  return out;
}

}  // namespace megatron
