#include <cuda_fp8.h>

#include "megatron/kernels/attention/paged_gather.h"
#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kGathered = 8;  // features of a thread, 16 bytes

template <class T>
__device__ __forceinline__ uint4 features_at(const PagedPool& pool, int64_t at, float scale) {
  if (pool.scale == nullptr)
    return *reinterpret_cast<const uint4*>(static_cast<const T*>(pool.data) + at);
  const uint2 codes = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(pool.data) + at);
  float features[kGathered];
#pragma unroll
  for (int i = 0; i < kGathered; i += 2) {
    const uint32_t word = i < 4 ? codes.x : codes.y;
    const __half2 pair = __nv_cvt_fp8x2_to_halfraw2(
        static_cast<__nv_fp8x2_storage_t>(word >> (8 * (i % 4))), __NV_E4M3);
    features[i] = __low2float(pair) * scale;
    features[i + 1] = __high2float(pair) * scale;
  }
  return pack_words<T>(features);
}

// A block per position.
template <class T>
__global__ void __launch_bounds__(kGatherThreads) paged_gather_kernel(PagedGather a) {
  const int64_t row = blockIdx.x, place = a.places[row], block = place / a.block_size;
  const auto of_key = static_cast<int>(a.key_size / kGathered),
             of_value = static_cast<int>(a.value_size / kGathered),
             groups = static_cast<int>(a.groups), of_keys = groups * of_key;
  for (int item = static_cast<int>(threadIdx.x); item < of_keys + groups * of_value;
       item += kGatherThreads) {
    const bool is_key = item < of_keys;
    const PagedPool& pool = is_key ? a.keys : a.values;
    const int i = is_key ? item : item - of_keys, of_head = is_key ? of_key : of_value;
    const int group = i / of_head, feature = i % of_head * kGathered;
    const int64_t from = block * pool.block_stride +
                         (place - block * a.block_size) * pool.position_stride +
                         group * pool.group_stride + feature;
    T* const out = static_cast<T*>(is_key ? a.out_keys : a.out_values);
    const int64_t to = (row * groups + group) * (is_key ? a.key_size : a.value_size) + feature;
    *reinterpret_cast<uint4*>(out + to) =
        features_at<T>(pool, from, pool.scale == nullptr ? 1.0f : pool.scale[group]);
  }
}

// 16 bytes of features, or 8 of codes.
bool has_groups(const PagedPool& pool, int64_t size) {
  return reinterpret_cast<uintptr_t>(pool.data) % 16 == 0 && size % kGathered == 0 &&
         pool.block_stride % kGathered == 0 && pool.position_stride % kGathered == 0 &&
         pool.group_stride % kGathered == 0;
}

}  // namespace

void paged_gather_cuda(const PagedGather& args, void* stream) {
  MEGATRON_ASSERT(has_groups(args.keys, args.key_size) && has_groups(args.values, args.value_size),
                  "positions of heads of ", args.key_size, " and ", args.value_size,
                  " features: expected multiples of ", kGathered, ", aligned to 16 bytes");
  if (args.rows == 0) return;
  const auto blocks = static_cast<unsigned>(args.rows);
  if (args.dtype == DType::kBFloat16) {
    paged_gather_kernel<__nv_bfloat16><<<blocks, kGatherThreads, 0, as_stream(stream)>>>(args);
  } else {
    MEGATRON_ASSERT(args.dtype == DType::kFloat16, "positions of ", to_string(args.dtype));
    paged_gather_kernel<__half><<<blocks, kGatherThreads, 0, as_stream(stream)>>>(args);
  }
  check_cuda(cudaGetLastError(), "paged_gather");
}

}  // namespace megatron
