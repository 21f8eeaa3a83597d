// Guesses of how texts go on. They cost time and change no token: what the model draws is compared
// with them, and they save the steps of those that are equal.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megatron/scheduling/sequence.h"

namespace megatron {

// A text whose tokens are all known.
struct DraftQuery {
  Sequence* sequence = nullptr;      // whose grammar may be asked to look ahead
  int64_t most = 0;                  // drafts that are wanted, at least 1
  std::vector<int32_t> drafts = {};  // the answer: at most so many
};

// Called by the thread of the scheduler.
class DraftSource {
 public:
  virtual ~DraftSource() = default;
  // Answers all queries, which are of different sequences.
  virtual void propose(std::span<DraftQuery> queries) = 0;
  // A sequence has ended.
  virtual void forget(const Sequence& sequence) = 0;
};

}  // namespace megatron
