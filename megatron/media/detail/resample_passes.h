// Weighted sums of pixels along rows and columns, as plain loops and with AVX2: the same bytes,
// for the sums are those of integers.
#pragma once

#include "megatron/media/detail/resample_weights.h"

namespace megatron::media {

// One row of 3-channel pixels: out[i] for each i of the weights. The AVX2 form may read
// Image::kReadableBehind bytes behind the last pixel that it needs.
struct RowPass {
  explicit RowPass(const AxisWeights& weights);
  void run(const uint8_t* in, uint8_t* out) const;        // AVX2
  void run_plain(const uint8_t* in, uint8_t* out) const;  // the definition

 private:
  const AxisWeights* weights_;
  int64_t groups_ = 0;  // of four taps
  // For each output and group the low 15 bits and the rest of its weights, in pairs as the sums of
  // products of 16-bit numbers take them: [count, groups, 2, 16].
  std::vector<int16_t> parts_;
};

// out[x] = sum over j < taps of weights[j] * rows[j * row_bytes + x] for x < bytes. The AVX2 form
// writes as the plain one does, and reads no byte behind the rows.
void column_sums(const uint8_t* rows, int64_t row_bytes, const int32_t* weights, int32_t taps,
                 int64_t bytes, uint8_t* out);
void column_sums_plain(const uint8_t* rows, int64_t row_bytes, const int32_t* weights, int32_t taps,
                       int64_t begin, int64_t end, uint8_t* out);

}  // namespace megatron::media
