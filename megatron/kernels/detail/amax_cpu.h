// Largest absolute values on the CPU.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>

namespace megatron {

// max(amax, largest |x|); NaN is ignored.
inline float amax_of(const float* x, int64_t n, float amax = 0.0f) {
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::fabs(x[i]);
    amax = size > amax ? size : amax;
  }
  return amax;
}

// *amax = max(*amax, value), from any thread.
inline void raise_amax(float* amax, float value) {
  std::atomic_ref<float> shared(*amax);
  float old = shared.load(std::memory_order_relaxed);
  while (value > old && !shared.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
}

}  // namespace megatron
