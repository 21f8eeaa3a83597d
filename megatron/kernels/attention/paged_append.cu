#include <cuda_fp8.h>

#include "megatron/kernels/attention/paged_append.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/paged_pool.h"
#include "megatron/kernels/detail/rotation.cuh"

namespace megatron {
namespace {

constexpr int kLanes = 32, kWarps = 8;
constexpr int kVectorThreads = 384;

// Writes a feature, or its code.
template <class T>
struct Target {
  T* elements = nullptr;
  uint8_t* codes = nullptr;
  float scale = 1.0f;

  __device__ __forceinline__ void store(int64_t feature, AccumulateType<T> x) const {
    T rounded;
    store_as(rounded, x);
    if (codes == nullptr) {
      elements[feature] = rounded;
      return;
    }
    // Divided as tensors are: in the type of sums
    const auto scaled = load_as<AccumulateType<T>>(rounded) / AccumulateType<T>(scale);
    codes[feature] = __nv_cvt_float_to_fp8(static_cast<float>(scaled), __NV_SATFINITE, __NV_E4M3);
  }
};

template <class T>
__device__ __forceinline__ Target<T> target_of(const PagedPool& pool, int64_t slot, int64_t size,
                                               int64_t group) {
  // Nearly all numbers fit in 32 bits, which are divided much faster.
  const bool fits = slot >> 32 == 0;
  const int64_t block =
      fits ? static_cast<uint32_t>(slot) / static_cast<uint32_t>(size) : slot / size;
  const int64_t place = block * pool.block_stride + (slot - block * size) * pool.position_stride +
                        group * pool.group_stride;
  if (pool.scale == nullptr) return {static_cast<T*>(const_cast<void*>(pool.data)) + place};
  return {nullptr, static_cast<uint8_t*>(const_cast<void*>(pool.data)) + place, pool.scale[group]};
}

// A warp per head of a row: the queries' heads, then keys, then values.
template <class T>
__global__ void __launch_bounds__(kLanes* kWarps) paged_append_kernel(PagedAppend a) {
  using Acc = AccumulateType<T>;
  const int64_t queries = a.query.data == nullptr ? 0 : a.groups * a.heads_per_group;
  const int64_t keys = a.key.data == nullptr ? 0 : a.groups;
  const int64_t values = a.value.data == nullptr ? 0 : a.groups;
  const int64_t of_row = queries + keys + values;
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes;
  const int64_t row = item / of_row, head = item % of_row;
  if (row >= a.rows) return;
  const int64_t lane = threadIdx.x % kLanes;
  const bool is_query = head < queries, is_key = !is_query && head < queries + keys;
  const AppendedHeads& heads = is_query ? a.query : is_key ? a.key : a.value;
  const int64_t group = is_query ? head / a.heads_per_group : (head - queries) % a.groups;
  const T* from =
      static_cast<const T*>(heads.data) + row * heads.row_stride + group * heads.group_stride;
  Target<T> to;
  if (is_query) {
    from += head % a.heads_per_group * heads.head_stride;
    to.elements = static_cast<T*>(a.out) + (row * queries + head) * heads.size;
  } else {
    const int64_t slot = a.slots[row];
    if (slot < 0) return;
    to = target_of<T>(is_key ? a.keys : a.values, slot, a.block_size, group);
  }
  const int64_t half = is_query || is_key ? a.half : 0;
  const Acc* cos = static_cast<const Acc*>(a.cos) + row * a.angle_stride;
  const Acc* sin = static_cast<const Acc*>(a.sin) + row * a.angle_stride;
  for (int64_t i = lane; i < half; i += kLanes) {
    const int64_t first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + half;
    const Acc x = load_as<Acc>(from[first]), y = load_as<Acc>(from[second]);
    Acc turned_x, turned_y;
    rotate_pair(x, y, cos[i], sin[i], turned_x, turned_y);
    to.store(first, turned_x);
    to.store(second, turned_y);
  }
  for (int64_t i = 2 * half + lane; i < heads.size; i += kLanes) to.store(i, load_as<Acc>(from[i]));
}

// -- heads of one size that are rotated whole, or not at all, in a type of 16 bits

constexpr int kVector = 8;  // features, in 16 bytes

template <class T>
__device__ __forceinline__ void store_vector(const Target<T>& to, int feature,
                                             const float (&x)[kVector]) {
  Pack<T> rounded;
#pragma unroll
  for (int j = 0; j < kVector; ++j) store_as(rounded.at[j], x[j]);
  if (to.codes == nullptr) return store_group(to.elements + feature, rounded);
  uint32_t words[2] = {};
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const uint32_t code =
        __nv_cvt_float_to_fp8(load_as<float>(rounded.at[j]) / to.scale, __NV_SATFINITE, __NV_E4M3);
    words[j / 4] |= code << (8 * (j % 4));
  }
  *reinterpret_cast<uint2*>(to.codes + feature) = {words[0], words[1]};
}

// A block per row; a thread has 8 features of the first half of a head and those of the second that
// are rotated with them.
template <class T>
__global__ void __launch_bounds__(kVectorThreads) paged_append_vectors_kernel(PagedAppend a) {
  const int queries = a.query.data == nullptr ? 0 : static_cast<int>(a.groups * a.heads_per_group);
  const int keys = a.key.data == nullptr ? 0 : static_cast<int>(a.groups);
  const int values = a.value.data == nullptr ? 0 : static_cast<int>(a.groups);
  const int size = static_cast<int>(queries > 0 ? a.query.size : a.key.size), half = size / 2,
            of_head = half / kVector, items = (queries + keys + values) * of_head;
  const int64_t row = blockIdx.x, slot = keys + values > 0 ? a.slots[row] : -1;
  const float* cos = static_cast<const float*>(a.cos) + row * a.angle_stride;
  const float* sin = static_cast<const float*>(a.sin) + row * a.angle_stride;
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kVectorThreads) {
    const int head = item / of_head, i = item % of_head * kVector;
    const bool is_query = head < queries, is_key = !is_query && head < queries + keys;
    const AppendedHeads& heads = is_query ? a.query : is_key ? a.key : a.value;
    const int of_group = static_cast<int>(a.heads_per_group);
    const int group = is_query ? head / of_group : head - queries - (is_key ? 0 : keys);
    const T* from =
        static_cast<const T*>(heads.data) + row * heads.row_stride + group * heads.group_stride;
    Target<T> to;
    if (is_query) {
      from += head % of_group * heads.head_stride;
      to.elements = static_cast<T*>(a.out) + (row * queries + head) * size;
    } else {
      if (slot < 0) continue;
      to = target_of<T>(is_key ? a.keys : a.values, slot, a.block_size, group);
    }
    float x[kVector], y[kVector];
    unpack<T>(*reinterpret_cast<const uint4*>(from + i), x);
    unpack<T>(*reinterpret_cast<const uint4*>(from + half + i), y);
    if (a.half > 0 && (is_query || is_key)) {
#pragma unroll
      for (int quarter = 0; quarter < kVector; quarter += 4) {
        const float4 c = *reinterpret_cast<const float4*>(cos + i + quarter),
                     s = *reinterpret_cast<const float4*>(sin + i + quarter);
        const float cosines[4] = {c.x, c.y, c.z, c.w}, sines[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float turned_x, turned_y;
          rotate_pair(x[quarter + j], y[quarter + j], cosines[j], sines[j], turned_x, turned_y);
          x[quarter + j] = turned_x;
          y[quarter + j] = turned_y;
        }
      }
    }
    store_vector(to, i, x);
    store_vector(to, half + i, y);
  }
}

bool is_aligned(const void* data, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

bool has_vectors(const PagedAppend& a) {
  if (a.dtype != DType::kBFloat16 && a.dtype != DType::kFloat16) return false;
  const int64_t size = a.query.data != nullptr ? a.query.size : a.key.size;
  if (a.key.data == nullptr && a.query.data == nullptr) return false;
  if (size % (2 * kVector) != 0 || a.interleaved) return false;
  if (a.half != 0 &&
      (2 * a.half != size || a.angle_stride % 4 != 0 || !is_aligned(a.cos) || !is_aligned(a.sin)))
    return false;
  for (const AppendedHeads* heads : {&a.query, &a.key, &a.value}) {
    if (heads->data == nullptr) continue;
    if (heads->size != size || !is_aligned(heads->data) || heads->row_stride % kVector != 0 ||
        heads->group_stride % kVector != 0 || heads->head_stride % kVector != 0)
      return false;
  }
  return is_aligned(a.out) && (a.key.data == nullptr || has_aligned_heads(a.keys)) &&
         (a.value.data == nullptr || has_aligned_heads(a.values));
}

}  // namespace

void paged_append_cuda(const PagedAppend& args, void* stream) {
  const int64_t of_row = (args.query.data != nullptr ? args.groups * args.heads_per_group : 0) +
                         (args.key.data != nullptr ? args.groups : 0) +
                         (args.value.data != nullptr ? args.groups : 0);
  const int64_t blocks = (args.rows * of_row + kWarps - 1) / kWarps;
  if (has_vectors(args)) {
    const auto rows = static_cast<unsigned>(args.rows);
    if (args.dtype == DType::kBFloat16) {
      paged_append_vectors_kernel<__nv_bfloat16>
          <<<rows, kVectorThreads, 0, as_stream(stream)>>>(args);
    } else {
      paged_append_vectors_kernel<__half><<<rows, kVectorThreads, 0, as_stream(stream)>>>(args);
    }
  } else {
    with_cuda_type(args.dtype, [&](auto type) {
      paged_append_kernel<decltype(type)>
          <<<static_cast<unsigned>(blocks), kLanes * kWarps, 0, as_stream(stream)>>>(args);
    });
  }
  check_cuda(cudaGetLastError(), "paged_append");
}

}  // namespace megatron
