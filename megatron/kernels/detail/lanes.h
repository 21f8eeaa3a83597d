// Sums over a range in a fixed order of additions that fills AVX registers: element i goes to lane
// i % 16, lanes are added pairwise at the end. The order depends on the length only.
#pragma once

#include <cstdint>

namespace megatron {

template <class Acc>
inline Acc add_lanes(const Acc (&lanes)[16]) {
  Acc sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = lanes[i] + lanes[i + 8];
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Sum of f(i) over [0, n); f is called in blocks of 16 that vectorise.
template <class Acc, class F>
inline Acc sum_over(int64_t n, F f) {
  Acc lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; ++j) lanes[j] += f(i + j);
  }
  for (int j = 0; i < n; ++i, ++j) lanes[j] += f(i);
  return add_lanes(lanes);
}

}  // namespace megatron
