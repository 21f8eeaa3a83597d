// The part of an encoder of media on a segment of the model.
#pragma once

#include <cstdint>
#include <limits>

namespace megatron {

struct StageSlice;

struct EncoderPart {
  // Layers, counted from 0. The first part has what comes before them, the last one what comes
  // behind them, and the projector.
  int64_t first = 0, count = std::numeric_limits<int64_t>::max();  // all
  bool begins = true, ends = true;
  bool is_there() const { return count > 0; }
};

// Of an encoder of `layers` layers, which the letters V of the layout divide: one has all of them,
// else each has one. Without V the segment with the embedding has all. Throws Error for another
// number of V.
EncoderPart encoder_part(const StageSlice& slice, int64_t layers);

}  // namespace megatron
