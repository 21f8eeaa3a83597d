#include <algorithm>
#include <cmath>

#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/fp8_math.h"

namespace megatron {
namespace {

constexpr int kWarps = 4, kLanes = 32;
constexpr int kSlices = static_cast<int>(kPagedAttentionWidth) / kLanes;

__device__ __forceinline__ int64_t place(const PagedAttention& a, const PagedPool& pool,
                                         const int32_t* blocks, int64_t position, int64_t group) {
  return blocks[position / a.block_size] * pool.block_stride +
         position % a.block_size * pool.position_stride + group * pool.group_stride;
}

// An element of a pool, without the scale of FP8.
template <class T, bool kFp8>
__device__ __forceinline__ AccumulateType<T> element(const PagedPool& pool, int64_t at) {
  if constexpr (kFp8) return e4m3_value(static_cast<const uint8_t*>(pool.data)[at]);
  return load_as<AccumulateType<T>>(static_cast<const T*>(pool.data)[at]);
}

// What a warp has seen: the maximum of its scores, the sum of exp(score - maximum), and each lane
// its features (lane, lane + 32, ...) of the sum of the values by these weights.
template <class Acc, int kOf>
struct Seen {
  Acc most, sum;
  Acc values[kOf];
};

template <class Acc>
__device__ __forceinline__ Acc sum_of_warp(Acc x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A block of threads per (row, head): each warp takes every kWarps-th position, then the parts are
// added in the order of the warps. kOf: features of a lane, at least those of a head.
template <class T, int kOf, bool kFp8>
__global__ void __launch_bounds__(kWarps* kLanes) paged_attention_kernel(PagedAttention a) {
  using Acc = AccumulateType<T>;
  const int64_t row = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
  const int64_t group = head / (a.heads / a.groups);
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int32_t* blocks = a.block_table + a.sequences[row] * a.table_stride;
  const int64_t end = a.lengths[row];
  const int64_t first = a.window_left < 0 ? 0 : max(int64_t{0}, end - 1 - a.window_left);
  const T* query = static_cast<const T*>(a.query) + (row * a.heads + head) * a.key_size;
  Acc q[kOf];
#pragma unroll
  for (int i = 0; i < kOf; ++i)
    q[i] = lane + i * kLanes < a.key_size ? load_as<Acc>(query[lane + i * kLanes]) : Acc{0};
  Seen<Acc, kOf> seen{-INFINITY, 0, {}};
  const Acc scale = static_cast<Acc>(a.scale) * (kFp8 ? Acc(a.keys.scale[group]) : Acc(1));
  const Acc value_scale = kFp8 ? Acc(a.values.scale[group]) : Acc(1);
  const Acc cap = static_cast<Acc>(a.softcap);
  for (int64_t position = first + warp; position < end; position += kWarps) {
    const int64_t k = place(a, a.keys, blocks, position, group);
    Acc dot = 0;
#pragma unroll
    for (int i = 0; i < kOf; ++i)
      if (lane + i * kLanes < a.key_size)
        dot += q[i] * element<T, kFp8>(a.keys, k + lane + i * kLanes);
    Acc score = scale * sum_of_warp(dot);
    if (cap > 0) score = cap * tanh(score / cap);
    const Acc most = max(seen.most, score), kept = exp(seen.most - most), p = exp(score - most);
    const int64_t v = place(a, a.values, blocks, position, group);
    seen.most = most;
    seen.sum = seen.sum * kept + p;
#pragma unroll
    for (int i = 0; i < kOf; ++i)
      if (lane + i * kLanes < a.value_size)
        seen.values[i] =
            seen.values[i] * kept + p * element<T, kFp8>(a.values, v + lane + i * kLanes);
  }
  __shared__ Acc most_of[kWarps], sum_of[kWarps], values_of[kWarps][kOf * kLanes];
  if (lane == 0) {
    most_of[warp] = seen.most;
    sum_of[warp] = seen.sum;
  }
#pragma unroll
  for (int i = 0; i < kOf; ++i) values_of[warp][lane + i * kLanes] = seen.values[i];
  __syncthreads();
  Acc most = most_of[0];
  for (int w = 1; w < kWarps; ++w) most = max(most, most_of[w]);
  Acc sink = 0;
  if (a.sinks != nullptr) {
    const Acc score = static_cast<const Acc*>(a.sinks)[head];
    most = max(most, score);
    sink = exp(score - most);
  }
  T* out = static_cast<T*>(a.out) + (row * a.heads + head) * a.value_size;
  for (int j = threadIdx.x; j < a.value_size; j += kWarps * kLanes) {
    Acc sum = sink, value = 0;
    for (int w = 0; w < kWarps; ++w) {
      const Acc weight = exp(most_of[w] - most);
      sum += weight * sum_of[w];
      value += weight * values_of[w][j];
    }
    store_as(out[j], end > 0 ? value_scale * value / sum : Acc(0));
  }
}

template <class T, int kOf>
void start(const PagedAttention& args, void* stream) {
  const auto blocks = static_cast<unsigned>(args.rows * args.heads);
  if (args.keys.scale != nullptr) {
    paged_attention_kernel<T, kOf, true><<<blocks, kWarps * kLanes, 0, as_stream(stream)>>>(args);
  } else {
    paged_attention_kernel<T, kOf, false><<<blocks, kWarps * kLanes, 0, as_stream(stream)>>>(args);
  }
}

}  // namespace

void paged_attention_cuda(const PagedAttention& args, void* stream) {
  const int64_t width = std::max(args.key_size, args.value_size);
  MEGATRON_ASSERT(width <= kPagedAttentionWidth, "paged attention with heads of ", width,
                  " features");
  if (has_paged_tiles(args)) return paged_tiles_cuda(args, stream);
  with_cuda_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (width <= 4 * kLanes) {
      start<T, 4>(args, stream);
    } else if (width <= 8 * kLanes) {
      start<T, 8>(args, stream);
    } else {
      start<T, kSlices>(args, stream);
    }
  });
  check_cuda(cudaGetLastError(), "paged_attention");
}

}  // namespace megatron
