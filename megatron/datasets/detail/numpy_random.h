// NumPy's legacy generator (numpy.random.RandomState), whose permutations define the sample order
// and whose draws mask samples.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

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

  // RandomState.randint(low, high): uniform in [low, high), which must not be empty.
  int64_t randint(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bounded(static_cast<uint64_t>(high - 1 - low)));
  }

  // The index that RandomState.choice(len(p), p=p) draws, from cumulative() of p.
  size_t choice(std::span<const double> cumulative) {
    const double u = uniform();
    size_t index = 0;
    while (index < cumulative.size() && cumulative[index] <= u) ++index;
    return index;
  }
  // Cumulative sums, each divided by the last one.
  static std::vector<double> cumulative(std::span<const double> probabilities) {
    std::vector<double> sums;
    double sum = 0;
    for (const double p : probabilities) sums.push_back(sum += p);
    for (double& s : sums) s /= sum;
    return sums;
  }

  // RandomState.geometric(p) for p < 1/3. It is 0 where NumPy's uniform draw is 0, as there.
  int64_t geometric(double p) {
    return static_cast<int64_t>(std::ceil(std::log1p(-uniform()) / std::log(1 - p)));
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
