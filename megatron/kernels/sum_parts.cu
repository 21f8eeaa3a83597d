#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/sum_parts.h"

namespace megatron {
namespace {

// Reads every part once, and the target if it accumulates; writes the target. A thread processes
// one group of consecutive elements at a time.
template <class T, class Target, class Group>
__global__ void sum_parts_kernel(SumParts sum) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = Group::kSize;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x * kSize;
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kSize; i < sum.count;
       i += stride) {
    Acc total[kSize] = {};
    for (int part = 0; part < sum.num_parts; ++part) {
      const Group x = load_group<Group>(static_cast<const T*>(sum.parts[part]) + i);
#pragma unroll
      for (int j = 0; j < kSize; ++j)
        total[j] = part == 0 ? load_as<Acc>(x.at[j]) : total[j] + load_as<Acc>(x.at[j]);
    }
    Target* target = static_cast<Target*>(sum.target) + i;
    if constexpr (!std::is_same_v<Target, T>) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        T rounded;
        store_as(rounded, total[j]);
        total[j] = load_as<Acc>(rounded);
      }
    }
    if (sum.accumulate) {
      Acc old[kSize];
      if constexpr (kSize == 1 || !std::is_same_v<Target, Acc>) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) old[j] = load_as<Acc>(target[j]);
      } else {
        load_run(target, old);
      }
#pragma unroll
      for (int j = 0; j < kSize; ++j) total[j] = old[j] + total[j];
    }
    if constexpr (kSize == 1 || !std::is_same_v<Target, Acc>) {
      Group out;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if constexpr (std::is_same_v<Target, T>) {
          store_as(out.at[j], total[j]);
        } else {
          store_as(target[j], total[j]);
        }
      }
      if constexpr (std::is_same_v<Target, T>) store_group(target, out);
    } else {
      store_run(target, total);
    }
  }
}

template <class T, class Target>
void launch_sum(const SumParts& sum, void* stream) {
  bool packs = fits_packs<T>(sum.count, {sum.target});
  for (int part = 0; part < sum.num_parts; ++part)
    packs = packs && fits_packs<T>(sum.count, {sum.parts[part]});
  if (packs) {
    sum_parts_kernel<T, Target, Pack<T>>
        <<<blocks_for(sum.count / Pack<T>::kSize), kThreads, 0, as_stream(stream)>>>(sum);
  } else {
    sum_parts_kernel<T, Target, Single<T>>
        <<<blocks_for(sum.count), kThreads, 0, as_stream(stream)>>>(sum);
  }
}

}  // namespace

void sum_parts_cuda(const SumParts& sum, void* stream) {
  if (sum.count == 0) return;
  with_cuda_type(sum.dtype, [&](auto type) {
    using T = decltype(type);
    if (sum.target_dtype == sum.dtype) {
      launch_sum<T, T>(sum, stream);
    } else {
      launch_sum<T, AccumulateType<T>>(sum, stream);
    }
  });
  check_cuda(cudaGetLastError(), "sum of parts");
}

}  // namespace megatron
