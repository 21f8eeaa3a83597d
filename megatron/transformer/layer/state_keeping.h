// How decoding keeps states of fixed size.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace megatron {

struct StateKeeping {
  // Types of the rows before a convolution, and of states. None: rows in that of the activations,
  // which loses nothing; states in fp32 (fp64 for fp64).
  std::optional<at::ScalarType> conv = {}, state = {};
  // The state is that at the last border of a chunk, and the operands of the rows behind it are
  // kept, so that decoding computes chunks as a forward of the whole sequence does.
  bool replays_chunks = false;
  // Rows of drafts at the end of a part, at most: they change no state before they stand.
  int64_t drafts = 0;

  bool operator==(const StateKeeping&) const = default;
};

}  // namespace megatron
