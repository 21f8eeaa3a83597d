// NumPy's legacy generator (numpy.random.RandomState), whose permutations define the sample order.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>

namespace megatron {

// Gives the same numbers as numpy.random.RandomState(seed).
class NumpyRandom {
 public:
  explicit NumpyRandom(uint32_t seed) : engine_(seed) {}

  uint32_t next_u32() { return static_cast<uint32_t>(engine_()); }

  // Uniform in [0, max], by rejection of masked numbers above max.
  uint64_t bounded(uint64_t max) {
    if (max == 0) return 0;
    uint64_t mask = max;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    uint64_t value;
    if (max <= 0xffffffffULL) {
      do value = next_u32() & mask;
      while (value > max);
    } else {
      do {
        const uint64_t high = next_u32();
        value = ((high << 32) | next_u32()) & mask;
      } while (value > max);
    }
    return value;
  }

  // Uniform in [0, 1) with 53 random bits.
  double uniform() {
    const uint32_t high = next_u32() >> 5, low = next_u32() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }

  // RandomState.shuffle of a one-dimensional array.
  template <class T>
  void shuffle(std::span<T> values) {
    for (uint64_t i = values.size(); i-- > 1;) std::swap(values[i], values[bounded(i)]);
  }

 private:
  std::mt19937 engine_;
};

}  // namespace megatron
