// The rows of x of a product of few rows, which each block reads for itself, with an RMSNorm or
// without; and the types and numbers of rows that its kernel is compiled for.
#pragma once

#include <type_traits>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/few_rows_product.h"

namespace megatron {

// The first packs of the norm's gain that each of `Threads` threads needs, on their way before x is
// there.
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

// Threads 0 ... Threads - 1 read x into shared memory, row r from r * stride on, a multiple of 8.
// `meet` is a barrier of these threads. Each of them changes what it has written itself.
template <class T, int Rows, int Threads, class Meet>
class RowsReader {
 public:
  __device__ RowsReader(const FewRowsProduct& a, T* x, int stride, const Meet& meet)
      : a_(a), x_(x), stride_(stride), packs_(static_cast<int>(a.inner) / 8), meet_(meet) {}

  __device__ void read() {
    read([](int, const uint4&) {});
  }

  // RMSNorm(x), rounded to T.
  __device__ void read_normed(const FirstGains<Threads>& gains) {
    float sums[Rows] = {};
    read([&](int r, const uint4& words) {
      float own[8];
      unpack<T>(words, own);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[r] += own[j] * own[j];
    });
    over_block(sums, [](float p, float q) { return p + q; });
#pragma unroll
    for (int r = 0; r < Rows; ++r)
      sums[r] = 1.0f / sqrtf(sums[r] / static_cast<float>(a_.inner) + static_cast<float>(a_.eps));
#pragma unroll
    for (int p = 0; p < FirstGains<Threads>::kPacks; ++p)
      if (first() + p * Threads < packs_) norm(first() + p * Threads, gains.at[p], sums);
    for (int i = first() + FirstGains<Threads>::kPacks * Threads; i < packs_; i += Threads)
      norm(i, __ldcg(static_cast<const uint4*>(a_.gain) + i), sums);
  }

  // Makes fp16 of what was read, times a power of two that brings a row's largest element below
  // 2^14. `inverse`: what undoes that.
  __device__ void scale_to_half(float (&inverse)[Rows]) {
    float most[Rows] = {};
#pragma unroll
    for (int r = 0; r < Rows; ++r)
      for (int i = first(); i < packs_; i += Threads) {
        float own[8];
        unpack<T>(row(r)[i], own);
#pragma unroll
        for (int j = 0; j < 8; ++j) most[r] = fmaxf(most[r], fabsf(own[j]));
      }
    meet_();  // what a sum before this one has left in shared memory is read
    over_block(most, [](float p, float q) { return fmaxf(p, q); });
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const int exponent = static_cast<int>(__float_as_uint(most[r]) >> 23) - 127;
      const int up = most[r] == 0.0f || exponent > 127 ? 0 : min(13 - exponent, 126);
      const float scale = __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
      inverse[r] = 1.0f / scale;
      for (int i = first(); i < packs_; i += Threads) {
        float own[8];
        unpack<T>(row(r)[i], own);
#pragma unroll
        for (int j = 0; j < 8; ++j) own[j] *= scale;
        row(r)[i] = pack_words<__half>(own);
      }
    }
  }

 private:
  __device__ static int first() { return static_cast<int>(threadIdx.x); }
  __device__ uint4* row(int r) const { return reinterpret_cast<uint4*>(x_ + r * stride_); }

  // look(row, pack) at all of x.
  template <class Look>
  __device__ void read(const Look& look) {
    constexpr int kBatch = 8 / Rows;  // packs of a row whose loads are under way together
    for (int begin = first(); begin < packs_; begin += kBatch * Threads) {
      uint4 words[Rows][kBatch];
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int p = 0; p < kBatch; ++p)
          if (begin + p * Threads < packs_)
            words[r][p] =
                __ldcg(static_cast<const uint4*>(a_.x) + r * packs_ + begin + p * Threads);
      }
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int p = 0; p < kBatch; ++p) {
          if (begin + p * Threads >= packs_) continue;
          row(r)[begin + p * Threads] = words[r][p];
          look(r, words[r][p]);
        }
      }
    }
  }

  __device__ void norm(int i, const uint4& gain_words, const float (&scales)[Rows]) {
    float gain[8];
    unpack<T>(gain_words, gain);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      float own[8];
      unpack<T>(row(r)[i], own);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        own[j] = own[j] * scales[r] * (a_.zero_centered ? gain[j] + 1.0f : gain[j]);
      row(r)[i] = pack_words<T>(own);
    }
  }

  // In a fixed order; every thread gets the results.
  template <class Combine>
  __device__ void over_block(float (&values)[Rows], const Combine& combine) {
    __shared__ float of_warps[Threads / 32][Rows];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
      for (int r = 0; r < Rows; ++r)
        values[r] = combine(values[r], __shfl_xor_sync(~0u, values[r], step));
    }
    if (first() % 32 == 0) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) of_warps[first() / 32][r] = values[r];
    }
    meet_();
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      values[r] = of_warps[0][r];
#pragma unroll
      for (int w = 1; w < Threads / 32; ++w) values[r] = combine(values[r], of_warps[w][r]);
    }
  }

  const FewRowsProduct& a_;
  T* const x_;
  const int stride_, packs_;
  const Meet& meet_;
};

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
