#include "megatron/kernels/cross_entropy.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/math.h"

namespace megatron {
namespace {

constexpr int kRowThreads = 512;  // one block per token

template <class T>
__global__ void parts_kernel(CrossEntropy ce, AccumulateType<T>* max, AccumulateType<T>* target) {
  using Acc = AccumulateType<T>;
  __shared__ Acc shared[33];
  const int64_t t = blockIdx.x;
  const T* x = static_cast<const T*>(ce.logits) + t * ce.stride;
  Acc best = -static_cast<Acc>(INFINITY);
  for (int64_t i = threadIdx.x; i < ce.valid; i += blockDim.x) best = MaxOp{}(load_as<Acc>(x[i]), best);
  best = reduce_block(best, MaxOp{}, shared);
  if (threadIdx.x == 0) {
    const int64_t id = ce.targets[t];
    max[t] = best;
    target[t] = id >= 0 && id < ce.valid ? load_as<Acc>(x[id]) : Acc(0);
  }
}

template <class T>
__global__ void sum_exp_kernel(CrossEntropy ce, const AccumulateType<T>* max, AccumulateType<T>* sum) {
  using Acc = AccumulateType<T>;
  __shared__ Acc shared[33];
  const int64_t t = blockIdx.x;
  const T* x = static_cast<const T*>(ce.logits) + t * ce.stride;
  const Acc top = max[t];
  Acc total = 0;
  for (int64_t i = threadIdx.x; i < ce.valid; i += blockDim.x) total += fast_exp(load_as<Acc>(x[i]) - top);
  total = reduce_block(total, AddOp{}, shared);
  if (threadIdx.x == 0) sum[t] = total;
}

template <class T>
__global__ void backward_kernel(CrossEntropy ce, CrossEntropyBackward args) {
  using Acc = AccumulateType<T>;
  const int64_t t = blockIdx.x, id = ce.targets[t];
  const T* x = static_cast<const T*>(ce.logits) + t * ce.stride;
  T* out = static_cast<T*>(args.dlogits) + t * args.stride;
  const Acc lse = static_cast<const Acc*>(args.lse)[t], scale = static_cast<const Acc*>(args.scale)[t];
  const Acc factor = scale * (Acc(1) + Acc(2) * static_cast<Acc>(args.z_coeff) * lse);
  for (int64_t i = threadIdx.x; i < ce.columns; i += blockDim.x) {
    Acc grad = 0;
    if (i < ce.valid) {
      grad = fast_exp(load_as<Acc>(x[i]) - lse) * factor;
      if (i == id) grad -= scale;
    }
    store_as(out[i], grad);
  }
}

}  // namespace

void cross_entropy_parts_cuda(const CrossEntropy& ce, void* max, void* target, void* stream) {
  with_cuda_type(ce.dtype, [&](auto type) {
    using T = decltype(type);
    using Acc = AccumulateType<T>;
    parts_kernel<T><<<static_cast<unsigned>(ce.tokens), kRowThreads, 0, as_stream(stream)>>>(
        ce, static_cast<Acc*>(max), static_cast<Acc*>(target));
  });
  check_cuda(cudaGetLastError(), "cross entropy parts");
}

void cross_entropy_sum_exp_cuda(const CrossEntropy& ce, const void* max, void* sum, void* stream) {
  with_cuda_type(ce.dtype, [&](auto type) {
    using T = decltype(type);
    using Acc = AccumulateType<T>;
    sum_exp_kernel<T><<<static_cast<unsigned>(ce.tokens), kRowThreads, 0, as_stream(stream)>>>(
        ce, static_cast<const Acc*>(max), static_cast<Acc*>(sum));
  });
  check_cuda(cudaGetLastError(), "cross entropy sum");
}

void cross_entropy_backward_cuda(const CrossEntropy& ce, const CrossEntropyBackward& args, void* stream) {
  with_cuda_type(ce.dtype, [&](auto type) {
    backward_kernel<decltype(type)>
        <<<static_cast<unsigned>(ce.tokens), kRowThreads, 0, as_stream(stream)>>>(ce, args);
  });
  check_cuda(cudaGetLastError(), "cross entropy backward");
}

}  // namespace megatron
