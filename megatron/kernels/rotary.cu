#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/rotary.h"

namespace megatron {
namespace {

// A thread per pair, or per feature that is only copied.
template <class T>
__global__ void rotary_kernel(Rotary rotary) {
  using Acc = AccumulateType<T>;
  const int64_t r = rotary.half, items = rotary.head_dim - r;  // r pairs, then d - 2 r copies
  const int64_t total = rotary.sequence * rotary.batch * rotary.heads * items;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < total; item += step) {
    const int64_t i = item % items, row = item / items;
    const int64_t head = row % rotary.heads, b = row / rotary.heads % rotary.batch;
    const int64_t s = row / rotary.heads / rotary.batch;
    const T* in = static_cast<const T*>(rotary.in) + s * rotary.stride_s + b * rotary.stride_b + head * rotary.stride_n;
    T* out = static_cast<T*>(rotary.out) + row * rotary.head_dim;
    if (i >= r) {
      out[i + r] = in[i + r];
      continue;
    }
    const int64_t angle = s * rotary.angle_stride_s + b * rotary.angle_stride_b + i;
    const Acc cosine = static_cast<const Acc*>(rotary.cos)[angle];
    const Acc sine = static_cast<Acc>(rotary.sign) * static_cast<const Acc*>(rotary.sin)[angle];
    const int64_t first = rotary.interleaved ? 2 * i : i, second = rotary.interleaved ? 2 * i + 1 : i + r;
    const Acc a = load_as<Acc>(in[first]), c = load_as<Acc>(in[second]);
    store_as(out[first], a * cosine - c * sine);
    store_as(out[second], c * cosine + a * sine);
  }
}

}  // namespace

void rotary_cuda(const Rotary& rotary, void* stream) {
  const int64_t total = rotary.sequence * rotary.batch * rotary.heads * (rotary.head_dim - rotary.half);
  with_cuda_type(rotary.dtype, [&](auto type) {
    rotary_kernel<decltype(type)><<<blocks_for(total), kThreads, 0, as_stream(stream)>>>(rotary);
  });
  check_cuda(cudaGetLastError(), "rotary");
}

}  // namespace megatron
