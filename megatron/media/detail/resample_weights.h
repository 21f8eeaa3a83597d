// Weights of an output sample over the input samples near it.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/media/resample.h"

namespace megatron::media {

// Weights have 22 fractional bits.
constexpr int kWeightBits = 22;

// For `count` outputs of an axis: output i is the sum over j < taps[i] of
// weights[i * most_taps + j] times input first[i] + j. Rows are filled up with zeros.
struct AxisWeights {
  int64_t most_taps = 0;
  std::vector<int32_t> first, taps, weights;
  int64_t count() const { return static_cast<int64_t>(first.size()); }
  const int32_t* of(int64_t output) const { return weights.data() + output * most_taps; }
};

// The room that an output's weights take.
int64_t most_taps(int64_t from, int64_t to, Resampling filter);

// Of outputs [begin, begin + count) of an axis that goes from `from` samples to `to`.
AxisWeights axis_weights(int64_t from, int64_t to, Resampling filter, int64_t begin, int64_t count);

}  // namespace megatron::media
