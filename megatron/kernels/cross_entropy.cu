#include "megatron/kernels/cross_entropy.h"
#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {
namespace {

constexpr int kRowThreads = 512;  // one block per token

__device__ __forceinline__ float exponential(float x) { return __expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// Running maximum of numbers and sum of exp(number - max).
template <class Acc>
struct OnlineSum {
  Acc max, sum;
};

struct JoinOp {
  template <class Acc>
  __device__ OnlineSum<Acc> operator()(OnlineSum<Acc> a, OnlineSum<Acc> b) const {
    const Acc top = a.max > b.max ? a.max : b.max;
    if (top == -static_cast<Acc>(INFINITY)) return {top, 0};
    return {top, a.sum * exponential(a.max - top) + b.sum * exponential(b.max - top)};
  }
};

template <class Acc>
__device__ OnlineSum<Acc> shuffle_xor(OnlineSum<Acc> value, int offset) {
  return {__shfl_xor_sync(0xffffffffu, value.max, offset),
          __shfl_xor_sync(0xffffffffu, value.sum, offset)};
}

template <class T, bool InPacks>
__global__ void sums_kernel(CrossEntropy ce, CrossEntropySums sums) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = InPacks ? Pack<T>::kSize : 1;
  __shared__ OnlineSum<Acc> shared[32];
  const int64_t t = blockIdx.x;
  const T* x = static_cast<const T*>(ce.logits) + t * ce.stride;
  OnlineSum<Acc> mine = {-static_cast<Acc>(INFINITY), 0};
  const int64_t whole = ce.valid / kSize * kSize;
  for (int64_t i = int64_t{threadIdx.x} * kSize; i < whole; i += int64_t{blockDim.x} * kSize) {
    Acc value[kSize];
    if constexpr (InPacks) {
      const Pack<T> pack = load_group<Pack<T>>(x + i);
#pragma unroll
      for (int j = 0; j < kSize; ++j) value[j] = load_as<Acc>(pack.at[j]);
    } else {
      value[0] = load_as<Acc>(x[i]);
    }
    Acc top = mine.max;
#pragma unroll
    for (int j = 0; j < kSize; ++j) top = MaxOp{}(value[j], top);
    if (top == -static_cast<Acc>(INFINITY)) continue;
    Acc sum = mine.sum * exponential(mine.max - top);
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum += exponential(value[j] - top);
    mine = {top, sum};
  }
  for (int64_t i = whole + threadIdx.x; i < ce.valid; i += blockDim.x) {
    mine = JoinOp{}(mine, OnlineSum<Acc>{load_as<Acc>(x[i]), 1});
  }
  for (int offset = 16; offset > 0; offset /= 2) mine = JoinOp{}(mine, shuffle_xor(mine, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) mine = JoinOp{}(mine, shared[warp]);
  const int64_t id = ce.targets[t];
  static_cast<Acc*>(sums.max)[t] = mine.max;
  static_cast<Acc*>(sums.sum)[t] = mine.sum;
  static_cast<Acc*>(sums.target)[t] = id >= 0 && id < ce.valid ? load_as<Acc>(x[id]) : Acc(0);
}

template <class T, bool InPacks>
__global__ void backward_kernel(CrossEntropy ce, CrossEntropyBackward args) {
  using Acc = AccumulateType<T>;
  const int64_t t = blockIdx.x, id = ce.targets[t];
  const T* x = static_cast<const T*>(ce.logits) + t * ce.stride;
  T* out = static_cast<T*>(args.dlogits) + t * args.stride;
  const Acc lse = static_cast<const Acc*>(args.lse)[t],
            scale = static_cast<const Acc*>(args.scale)[t];
  const Acc factor = scale * (Acc(1) + Acc(2) * static_cast<Acc>(args.z_coeff) * lse);
  const auto grad = [&](int64_t i, const T& logit) {
    if (i >= ce.valid) return Acc(0);
    const Acc softmax = exponential(load_as<Acc>(logit) - lse) * factor;
    return i == id ? softmax - scale : softmax;
  };
  if constexpr (InPacks) {
    constexpr int kSize = Pack<T>::kSize;
    for (int64_t i = int64_t{threadIdx.x} * kSize; i < ce.columns;
         i += int64_t{blockDim.x} * kSize) {
      const Pack<T> in = load_group<Pack<T>>(x + i);
      Pack<T> result;
#pragma unroll
      for (int j = 0; j < kSize; ++j) store_as(result.at[j], grad(i + j, in.at[j]));
      store_group(out + i, result);
    }
  } else {
    for (int64_t i = threadIdx.x; i < ce.columns; i += blockDim.x) store_as(out[i], grad(i, x[i]));
  }
}

}  // namespace

void cross_entropy_sums_cuda(const CrossEntropy& ce, const CrossEntropySums& sums, void* stream) {
  with_cuda_type(ce.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel =
        fits_packs<T>(ce.stride, {ce.logits}) ? sums_kernel<T, true> : sums_kernel<T, false>;
    kernel<<<static_cast<unsigned>(ce.tokens), kRowThreads, 0, as_stream(stream)>>>(ce, sums);
  });
  check_cuda(cudaGetLastError(), "cross entropy sums");
}

void cross_entropy_backward_cuda(const CrossEntropy& ce, const CrossEntropyBackward& args,
                                 void* stream) {
  with_cuda_type(ce.dtype, [&](auto type) {
    using T = decltype(type);
    const bool packs = fits_packs<T>(ce.stride, {ce.logits}) &&
                       fits_packs<T>(args.stride, {args.dlogits}) && fits_packs<T>(ce.columns, {});
    const auto kernel = packs ? backward_kernel<T, true> : backward_kernel<T, false>;
    kernel<<<static_cast<unsigned>(ce.tokens), kRowThreads, 0, as_stream(stream)>>>(ce, args);
  });
  check_cuda(cudaGetLastError(), "cross entropy backward");
}

}  // namespace megatron
