#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/retrieval/nearest.h"

namespace megatron {
namespace {

constexpr int kQueries = 32;  // of a block of the scan
constexpr int kLoads = 8;     // on their way at once
constexpr int kPairThreads = 256;

__device__ __forceinline__ void add_candidate(const Candidates& all, int64_t query, float lower,
                                              float upper, int32_t row) {
  const int32_t at = atomicAdd(all.counts + query, 1);
  if (at >= all.capacity) return;
  const int64_t place = query * all.capacity + at;
  all.lower[place] = lower;
  all.upper[place] = upper;
  all.rows[place] = row;
}

// A thread has the same columns of kQueries queries; what depends on the column stays in registers.
template <class T, class Group>
__global__ void __launch_bounds__(kThreads) scan_kernel(CandidateScan scan) {
  constexpr int kSize = Group::kSize;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kSize;
  if (first >= scan.columns) return;
  float square[kSize], error[kSize], norm[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    square[i] = scan.squares[first + i];
    error[i] = scan.errors[first + i];
    norm[i] = scan.norms[first + i];
  }
  const int64_t begin = int64_t{blockIdx.y} * kQueries;
  const int64_t end = begin + kQueries < scan.queries ? begin + kQueries : scan.queries;
  const T* products = static_cast<const T*>(scan.products);
  // Loads do not move over atomics by themselves.
  for (int64_t q = begin; q < end; q += kLoads) {
    Group p[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      if (q + j < end) p[j] = load_group<Group>(products + (q + j) * scan.columns + first);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (q + j >= end) break;
      const float query_norm = scan.query_norms[q + j], query_error = scan.query_errors[q + j],
                  limit = scan.limits[q + j];
      float distance[kSize], off[kSize];
      bool some = false;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float product = load_as<float>(p[j].at[i]);
        distance[i] = square[i] - 2 * product;
        off[i] = scan.rounding * fabsf(product) + (query_norm * error[i] + query_error * norm[i]);
        some = some || !(distance[i] - off[i] > limit);
      }
      if (!some) continue;
      for (int i = 0; i < kSize; ++i) {
        if (!(distance[i] - off[i] > limit))
          add_candidate(scan.out, q + j, distance[i] - off[i], distance[i] + off[i],
                        scan.first_row + static_cast<int32_t>(first + i));
      }
    }
  }
}

// A block per query.
__global__ void filter_kernel(CandidateFilter filter) {
  const int64_t q = blockIdx.x;
  const int64_t count = filter.from.counts[q];
  const float limit = filter.limits[q];
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const int64_t at = q * filter.from.capacity + i;
    if (!(filter.from.lower[at] > limit))
      add_candidate(filter.to, q, filter.from.lower[at], filter.from.upper[at],
                    filter.from.rows[at]);
  }
}

// A block per query, a warp per pair.
__global__ void __launch_bounds__(kPairThreads) pair_distances_kernel(PairDistances pairs) {
  const int64_t q = blockIdx.x;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const float* query = pairs.queries + q * pairs.width;
  for (int64_t i = threadIdx.x / 32; i < pairs.counts[q]; i += warps) {
    const float* x = pairs.vectors + int64_t{pairs.rows[q * pairs.capacity + i]} * pairs.width;
    double sum = 0;
#pragma unroll 8
    for (int64_t k = lane; k < pairs.width; k += 32) {
      const double difference = static_cast<double>(query[k]) - x[k];
      sum += difference * difference;
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    if (lane == 0) pairs.out[q * pairs.capacity + i] = sum;
  }
}

template <class T, class Group>
void launch_scan(const CandidateScan& scan, void* stream) {
  const int64_t threads = (scan.columns + Group::kSize - 1) / Group::kSize;
  const dim3 blocks(static_cast<unsigned>((threads + kThreads - 1) / kThreads),
                    static_cast<unsigned>((scan.queries + kQueries - 1) / kQueries));
  scan_kernel<T, Group><<<blocks, kThreads, 0, as_stream(stream)>>>(scan);
}

}  // namespace

void scan_candidates_cuda(const CandidateScan& scan, void* stream) {
  if (scan.queries == 0 || scan.columns == 0) return;
  with_cuda_type(scan.dtype, [&](auto type) {
    using T = decltype(type);
    if (fits_packs<T>(scan.columns, {scan.products})) {
      launch_scan<T, Pack<T>>(scan, stream);
    } else {
      launch_scan<T, Single<T>>(scan, stream);
    }
  });
  check_cuda(cudaGetLastError(), "scan of candidates");
}

void filter_candidates_cuda(const CandidateFilter& filter, void* stream) {
  if (filter.queries == 0) return;
  filter_kernel<<<static_cast<unsigned>(filter.queries), kThreads, 0, as_stream(stream)>>>(filter);
  check_cuda(cudaGetLastError(), "filter of candidates");
}

void pair_distances_cuda(const PairDistances& pairs, void* stream) {
  if (pairs.num_queries == 0) return;
  pair_distances_kernel<<<static_cast<unsigned>(pairs.num_queries), kPairThreads, 0,
                          as_stream(stream)>>>(pairs);
  check_cuda(cudaGetLastError(), "distances of pairs");
}

}  // namespace megatron
