// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and the
// distributions derived from its words. Bit-equal on the CPU and on CUDA.
#pragma once

#include <cstdint>

#include "megatron/kernels/detail/math.h"
#include "megatron/kernels/philox.h"

namespace megatron {

// Ten rounds, in place: counter in, four random words out.
MEGATRON_HOST_DEVICE void philox_rounds(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3,
                                        uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// The upper 24 bits as a multiple of 2^-24 in [0, 1).
MEGATRON_HOST_DEVICE float unit_uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;
}

// Box-Muller: two normal random numbers from two words.
MEGATRON_HOST_DEVICE void normal_pair(uint32_t w0, uint32_t w1, float* n0, float* n1) {
  // (w0 + 1/2) / 2^32, in (0, 1].
  const float high = static_cast<float>(static_cast<int32_t>(w0 >> 16));
  const float low = static_cast<float>(static_cast<int32_t>(w0 & 0xffffu));
  const float u =
      fused(high, 1.52587890625e-5f, fused(low, 2.3283064365386963e-10f, 1.1641532182693481e-10f));
  float square = -2.0f * fast_log(u);
  square = square > 0.0f ? square : 0.0f;
#ifdef __CUDA_ARCH__
  const float radius = __fsqrt_rn(square);
#else
  const float radius = __builtin_sqrtf(square);
#endif
  float sine, cosine;
  sincos_turn(w1, &sine, &cosine);
  *n0 = radius * cosine;
  *n1 = radius * sine;
}

// What the counters of a row's elements begin with.
struct FillPlace {
  uint64_t base = 0;
  uint32_t c2 = 0, c3 = 0;
};
MEGATRON_HOST_DEVICE FillPlace fill_place(const RandomFill& fill, int64_t row) {
  if (fill.position == nullptr) return {};
  const uint64_t sample = static_cast<uint64_t>(fill.sample[row % fill.batch]);
  return {static_cast<uint64_t>(fill.position[row / fill.batch]) << 32,
          static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)};
}

// Probability p as a threshold: a word below it drops the element.
MEGATRON_HOST_DEVICE uint64_t drop_threshold(double p) {
  return static_cast<uint64_t>(p * 4294967296.0 + 0.5);
}

}  // namespace megatron
