#include <cuda_fp8.h>

#include "megatron/kernels/attention/paged_append.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/rotation.cuh"

namespace megatron {
namespace {

constexpr int kLanes = 32, kWarps = 8;

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
  const int64_t place = slot / size * pool.block_stride + slot % size * pool.position_stride +
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

}  // namespace

void paged_append_cuda(const PagedAppend& args, void* stream) {
  const int64_t of_row = (args.query.data != nullptr ? args.groups * args.heads_per_group : 0) +
                         (args.key.data != nullptr ? args.groups : 0) +
                         (args.value.data != nullptr ? args.groups : 0);
  const int64_t blocks = (args.rows * of_row + kWarps - 1) / kWarps;
  with_cuda_type(args.dtype, [&](auto type) {
    paged_append_kernel<decltype(type)>
        <<<static_cast<unsigned>(blocks), kLanes * kWarps, 0, as_stream(stream)>>>(args);
  });
  check_cuda(cudaGetLastError(), "paged_append");
}

}  // namespace megatron
