// What kernels of products of few rows share: how they read weights, and the rows of x, with an
// RMSNorm or without, which each block computes for itself; and how they write.
#pragma once

#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/norm_rows.cuh"
#include "megatron/kernels/few_rows_product.h"

namespace megatron {

__device__ __forceinline__ uint4 load_streamed(const void* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// The first packs of the norm's gain that a thread of `Threads` needs, on their way with the first
// weights.
template <int Threads>
struct FirstGains {
  static constexpr int kPacks = 512 / Threads;
  uint4 at[kPacks] = {};

  __device__ explicit FirstGains(const FewRowsProduct& a) {
    if (a.gain == nullptr) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int i = static_cast<int>(threadIdx.x) + p * Threads;
      if (i < static_cast<int>(a.inner) / 8) at[p] = __ldcg(static_cast<const uint4*>(a.gain) + i);
    }
  }
};

// x in shared memory, as it is: row r from r * stride on, a multiple of 8.
template <class T, int Rows>
__device__ void read_rows(const FewRowsProduct& a, T* x, int stride) {
  const int packs = static_cast<int>(a.inner) / 8;
#pragma unroll
  for (int r = 0; r < Rows; ++r)
    for (int i = static_cast<int>(threadIdx.x); i < packs; i += static_cast<int>(blockDim.x))
      reinterpret_cast<uint4*>(x + r * stride)[i] =
          __ldcg(static_cast<const uint4*>(a.x) + r * packs + i);
}

// RMSNorm(x) in shared memory.
template <class T, int Rows, int Threads>
__device__ void read_normed_rows(const FewRowsProduct& a, const FirstGains<Threads>& gains, T* x,
                                 int stride) {
  __shared__ float shared[2][32][Rows];
  const int packs = static_cast<int>(a.inner) / 8, first = static_cast<int>(threadIdx.x);
  const auto row = [&](int r) { return reinterpret_cast<uint4*>(x + r * stride); };
  float scales[Rows] = {};
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    for (int i = first; i < packs; i += Threads) {
      const uint4 words = __ldcg(static_cast<const uint4*>(a.x) + r * packs + i);
      row(r)[i] = words;
      float own[8];
      unpack<T>(words, own);
#pragma unroll
      for (int j = 0; j < 8; ++j) scales[r] += own[j] * own[j];
    }
  }
  sum_block(scales, shared, 0);
#pragma unroll
  for (int r = 0; r < Rows; ++r)
    scales[r] = 1.0f / sqrtf(scales[r] / static_cast<float>(a.inner) + static_cast<float>(a.eps));
  const auto scale = [&](int i, const uint4& words) {
    float gain[8];
    unpack<T>(words, gain);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      float own[8];
      unpack<T>(row(r)[i], own);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        own[j] = own[j] * scales[r] * (a.zero_centered ? gain[j] + 1.0f : gain[j]);
      row(r)[i] = pack_words<T>(own);
    }
  };
#pragma unroll
  for (int p = 0; p < FirstGains<Threads>::kPacks; ++p) {
    const int i = first + p * Threads;
    if (i < packs) scale(i, gains.at[p]);
  }
  for (int i = first + FirstGains<Threads>::kPacks * Threads; i < packs; i += Threads)
    scale(i, __ldcg(static_cast<const uint4*>(a.gain) + i));
}

// A column of row `r` of the result, whose sum is given, and with Swiglu that of its gate.
template <class T, bool Swiglu>
__device__ __forceinline__ void store_product(const FewRowsProduct& a, int64_t r, int64_t column,
                                              float sum, float gate_sum) {
  const int64_t at = r * a.columns + column;
  T* const out = static_cast<T*>(a.out) + at;
  if constexpr (Swiglu) {
    T gate, value;
    store_as(gate, gate_sum);
    store_as(value, sum);
    store_as(*out, SiluGate::at(load_as<float>(gate)).act * load_as<float>(value));
  } else {
    const float bias =
        a.bias == nullptr ? 0.0f : load_as<float>(static_cast<const T*>(a.bias)[column]);
    // Not from the L1 cache: a kernel that begins early may find it filled before the write
    const float more =
        a.addend == nullptr ? 0.0f : load_as<float>(__ldcg(static_cast<const T*>(a.addend) + at));
    store_as(*out, sum + bias + more);
  }
}

// f(T{}, number of rows as a constant) for the product's type and rows.
template <class F>
void with_type_and_rows(const FewRowsProduct& args, const F& f) {
  const auto with_rows = [&](auto type) {
    switch (args.rows) {
      case 1:
        return f(type, std::integral_constant<int, 1>());
      case 2:
        return f(type, std::integral_constant<int, 2>());
      case 3:
        return f(type, std::integral_constant<int, 3>());
      default:
        return f(type, std::integral_constant<int, 4>());
    }
  };
  if (args.dtype == DType::kBFloat16) {
    with_rows(__nv_bfloat16{});
  } else {
    with_rows(__half{});
  }
}

}  // namespace megatron
