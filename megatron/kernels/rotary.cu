#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/rotation.cuh"
#include "megatron/kernels/rotary.h"

namespace megatron {
namespace {

// Where a head lies and which angles rotate it.
struct HeadPlace {
  int64_t in, out, angle;
};

__device__ __forceinline__ HeadPlace head_place(const Rotary& rotary, int64_t row) {
  const int64_t head = row % rotary.heads, b = row / rotary.heads % rotary.batch,
                s = row / rotary.heads / rotary.batch;
  return {s * rotary.stride_s + b * rotary.stride_b + head * rotary.stride_n,
          s * rotary.out_stride_s + b * rotary.out_stride_b + head * rotary.out_stride_n,
          s * rotary.angle_stride_s + b / rotary.batch_per_angle * rotary.angle_stride_b};
}

// A thread per pair, or per feature that is only copied.
template <class T>
__global__ void rotary_kernel(Rotary rotary) {
  using Acc = AccumulateType<T>;
  const int64_t r = rotary.half, items = rotary.head_dim - r;  // r pairs, then d - 2 r copies
  const int64_t total = rotary.sequence * rotary.batch * rotary.heads * items;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < total; item += step) {
    const int64_t i = item % items;
    const HeadPlace place = head_place(rotary, item / items);
    const T* in = static_cast<const T*>(rotary.in) + place.in;
    T* out = static_cast<T*>(rotary.out) + place.out;
    if (i >= r) {
      out[i + r] = in[i + r];
      continue;
    }
    const Acc cosine = static_cast<const Acc*>(rotary.cos)[place.angle + i];
    const Acc sine =
        static_cast<Acc>(rotary.sign) * static_cast<const Acc*>(rotary.sin)[place.angle + i];
    const int64_t first = rotary.interleaved ? 2 * i : i,
                  second = rotary.interleaved ? 2 * i + 1 : i + r;
    const Acc a = load_as<Acc>(in[first]), c = load_as<Acc>(in[second]);
    Acc x, y;
    rotate_pair(a, c, cosine, sine, x, y);
    store_as(out[first], x);
    store_as(out[second], y);
  }
}

// For rotations of halves as a whole: a thread rotates one pack of the first half against its
// partners in the second.
template <class T>
__global__ void rotary_packs(Rotary rotary) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = Pack<T>::kSize;
  const uint32_t packs = static_cast<uint32_t>(rotary.half / kSize);
  const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t row = item / packs, i = item % packs * kSize;
  if (row >= rotary.sequence * rotary.batch * rotary.heads) return;
  const HeadPlace place = head_place(rotary, row);
  const T* in = static_cast<const T*>(rotary.in) + place.in + i;
  T* out = static_cast<T*>(rotary.out) + place.out + i;
  Acc cosine[kSize], sine[kSize];
  load_run(static_cast<const Acc*>(rotary.cos) + place.angle + i, cosine);
  load_run(static_cast<const Acc*>(rotary.sin) + place.angle + i, sine);
  const Pack<T> a = load_group<Pack<T>>(in), c = load_group<Pack<T>>(in + rotary.half);
  Pack<T> first, second;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    Acc x, y;
    rotate_pair(load_as<Acc>(a.at[j]), load_as<Acc>(c.at[j]), cosine[j],
                static_cast<Acc>(rotary.sign) * sine[j], x, y);
    store_as(first.at[j], x);
    store_as(second.at[j], y);
  }
  store_group(out, first);
  store_group(out + rotary.half, second);
}

template <class T>
bool turns_packs(const Rotary& rotary) {
  bool fits = !rotary.interleaved && 2 * rotary.half == rotary.head_dim &&
              fits_packs<T>(rotary.half, {rotary.in, rotary.out, rotary.cos, rotary.sin}) &&
              rotary.sequence * rotary.batch * rotary.heads * rotary.half < INT32_MAX;
  for (const int64_t stride : {rotary.stride_s, rotary.stride_b, rotary.stride_n,
                               rotary.out_stride_s, rotary.out_stride_b, rotary.out_stride_n}) {
    fits = fits && stride % Pack<T>::kSize == 0;
  }
  return fits;
}

}  // namespace

void rotary_cuda(const Rotary& rotary, void* stream) {
  const int64_t total =
      rotary.sequence * rotary.batch * rotary.heads * (rotary.head_dim - rotary.half);
  with_cuda_type(rotary.dtype, [&](auto type) {
    using T = decltype(type);
    if (turns_packs<T>(rotary)) {
      const int64_t packs = total / Pack<T>::kSize;
      rotary_packs<T><<<static_cast<unsigned>((packs + kThreads - 1) / kThreads), kThreads, 0,
                        as_stream(stream)>>>(rotary);
    } else {
      rotary_kernel<T><<<blocks_for(total), kThreads, 0, as_stream(stream)>>>(rotary);
    }
  });
  check_cuda(cudaGetLastError(), "rotary");
}

}  // namespace megatron
