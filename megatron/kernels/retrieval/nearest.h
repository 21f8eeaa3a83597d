// Which vectors may be among the nearest, from products of rounded vectors.
//
// For a query q and a vector x, |x - q|^2 - |q|^2 = |x|^2 - 2 q.x. With the product p of rounded
// q' and x' it lies between |x|^2 - 2 p - e and |x|^2 - 2 p + e,
//
//   e = 2 (|q| a + |q - q'| b) + 2 u |p|,  a >= |x - x'| + g |x|,  b >= |x'|,
//
// where g bounds the rounding of a sum of products and u that of the product that is stored.
// Vectors whose lower bound is above a limit of the query are no candidates.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// Of each query up to `capacity` candidates, in any order.
struct Candidates {
  float *lower = nullptr, *upper = nullptr;  // [queries, capacity]
  int32_t* rows = nullptr;                   // [queries, capacity]
  // [queries]: how many there are; more than `capacity` if some were not kept
  int32_t* counts = nullptr;
  int64_t capacity = 0;
};

struct CandidateScan {
  DType dtype = DType::kBFloat16;
  const void* products = nullptr;  // [queries, columns] of `dtype`: p
  int64_t queries = 0, columns = 0;
  int32_t first_row = 0;                // of the first column
  const float* query_norms = nullptr;   // [queries]: 2 |q|
  const float* query_errors = nullptr;  // [queries]: 2 |q - q'|
  const float* limits = nullptr;        // [queries]
  const float* squares = nullptr;       // [columns]: |x|^2
  const float* errors = nullptr;        // [columns]: a
  const float* norms = nullptr;         // [columns]: b
  float rounding = 0;                   // 2 u
  Candidates out;                       // are added to those that are there
};
void scan_candidates_cpu(const CandidateScan& scan, int64_t begin, int64_t end);  // of queries
void scan_candidates_cuda(const CandidateScan& scan, void* stream);

// Appends to `to` the candidates whose lower bound is not above the limit of their query.
struct CandidateFilter {
  Candidates from, to;
  const float* limits = nullptr;  // [queries]
  int64_t queries = 0;
};
void filter_candidates_cpu(const CandidateFilter& filter, int64_t begin, int64_t end);
void filter_candidates_cuda(const CandidateFilter& filter, void* stream);

// |x - q|^2 in fp64 of queries and candidates.
struct PairDistances {
  const float* queries = nullptr;  // [queries, width]
  const float* vectors = nullptr;  // [rows, width]
  int64_t num_queries = 0, width = 0;
  const int32_t* rows = nullptr;    // [queries, capacity]
  const int32_t* counts = nullptr;  // [queries]
  int64_t capacity = 0;
  double* out = nullptr;  // [queries, capacity]; the first `counts` of each are written
};
void pair_distances_cpu(const PairDistances& pairs, int64_t begin, int64_t end);  // of queries
void pair_distances_cuda(const PairDistances& pairs, void* stream);

}  // namespace megatron
