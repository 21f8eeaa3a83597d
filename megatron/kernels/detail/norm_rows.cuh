// Shared by the CUDA kernels of norms.
#pragma once

#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {

// N consecutive elements of a norm's gain or bias of type W.
template <class W, int N, class Acc>
__device__ __forceinline__ void load_weights(const void* weights, int64_t i, Acc (&to)[N]) {
  if constexpr (std::is_same_v<W, Acc>) {
    load_run(static_cast<const Acc*>(weights) + i, to);
  } else {
    unpack<W>(*reinterpret_cast<const uint4*>(static_cast<const W*>(weights) + i), to);
  }
}
template <class W, int N, class Acc, class Norm>
__device__ __forceinline__ void load_gain(const Norm& norm, int64_t i, Acc (&to)[N]) {
  load_weights<W>(norm.gain, i, to);
  const Acc more = norm.zero_centered ? Acc(1) : Acc(0);
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] += more;
}

// Sums over the threads with the same threadIdx.y, in a fixed order; each of them gets the sums. At
// most one barrier of the whole block: `turn` must alternate between calls.
template <int Count, class Acc>
__device__ void sum_block(Acc (&sums)[Count], Acc (&shared)[2][32][Count], int turn) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int c = 0; c < Count; ++c) sums[c] += __shfl_xor_sync(0xffffffffu, sums[c], offset);
  }
  const int warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warps == 1) return;
  const int first = static_cast<int>(threadIdx.y) * warps;
  if (lane == 0) {
#pragma unroll
    for (int c = 0; c < Count; ++c) shared[turn][first + threadIdx.x / 32][c] = sums[c];
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < Count; ++c) sums[c] = lane < warps ? shared[turn][first + lane][c] : Acc(0);
  for (int offset = warps > 16  ? 16
                    : warps > 8 ? 8
                    : warps > 4 ? 4
                    : warps > 2 ? 2
                                : 1;
       offset > 0; offset /= 2) {
#pragma unroll
    for (int c = 0; c < Count; ++c) sums[c] += __shfl_xor_sync(0xffffffffu, sums[c], offset);
  }
#pragma unroll
  for (int c = 0; c < Count; ++c) sums[c] = __shfl_sync(0xffffffffu, sums[c], 0);
}

// f(W{}) with the type of a norm's weights.
template <class T, class Norm, class F>
void with_weight_type(const Norm& norm, const F& f) {
  if constexpr (!std::is_same_v<T, AccumulateType<T>>) {
    if (norm.weights_as_x) return f(T{});
  }
  f(AccumulateType<T>{});
}

}  // namespace megatron
