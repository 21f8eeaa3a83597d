#include <algorithm>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/retrieval/nearest.h"

namespace megatron {
namespace {

constexpr int64_t kRun = 256;

void add_candidate(const Candidates& all, int64_t query, float lower, float upper, int32_t row) {
  const int32_t at = all.counts[query]++;
  if (at >= all.capacity) return;
  const int64_t place = query * all.capacity + at;
  all.lower[place] = lower;
  all.upper[place] = upper;
  all.rows[place] = row;
}

}  // namespace

void scan_candidates_cpu(const CandidateScan& scan, int64_t begin, int64_t end) {
  float scratch[kRun];
  for (int64_t q = begin; q < end; ++q) {
    for (int64_t at = 0; at < scan.columns; at += kRun) {
      const int64_t n = std::min(kRun, scan.columns - at);
      const float* p = load_run(scan.dtype, scan.products, q * scan.columns + at, n, scratch);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t j = at + i;
        const float distance = scan.squares[j] - 2 * p[i];
        const float error = scan.rounding * std::abs(p[i]) + (scan.query_norms[q] * scan.errors[j] +
                                                              scan.query_errors[q] * scan.norms[j]);
        if (!(distance - error > scan.limits[q]))
          add_candidate(scan.out, q, distance - error, distance + error,
                        scan.first_row + static_cast<int32_t>(j));
      }
    }
  }
}

void filter_candidates_cpu(const CandidateFilter& filter, int64_t begin, int64_t end) {
  const Candidates& from = filter.from;
  for (int64_t q = begin; q < end; ++q) {
    for (int64_t i = 0; i < from.counts[q]; ++i) {
      const int64_t at = q * from.capacity + i;
      if (!(from.lower[at] > filter.limits[q]))
        add_candidate(filter.to, q, from.lower[at], from.upper[at], from.rows[at]);
    }
  }
}

void pair_distances_cpu(const PairDistances& pairs, int64_t begin, int64_t end) {
  for (int64_t q = begin; q < end; ++q) {
    const float* query = pairs.queries + q * pairs.width;
    for (int64_t i = 0; i < pairs.counts[q]; ++i) {
      const float* x = pairs.vectors + pairs.rows[q * pairs.capacity + i] * pairs.width;
      double sum = 0;
      for (int64_t k = 0; k < pairs.width; ++k) {
        const double difference = static_cast<double>(query[k]) - x[k];
        sum += difference * difference;
      }
      pairs.out[q * pairs.capacity + i] = sum;
    }
  }
}

}  // namespace megatron
