// The order of forward passes and of backward passes of every stage, each by itself; merging the
// two is left to the schedules.
#pragma once

#include <vector>

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// Forward order: for each group of micro-batches, for each chunk, the micro-batches of the group.
// Backward order: the same with the chunks reversed. With one chunk: the micro-batches in order.
class PassOrder {
 public:
  explicit PassOrder(const ScheduleShape& shape);

  int size() const { return static_cast<int>(forward_.size()); }  // forward passes of a stage
  Action forward(int k) const { return forward_[static_cast<size_t>(k)]; }
  Action backward(int k, Action::Kind kind) const {
    const Action& pass = forward_[static_cast<size_t>(k)];
    return {kind, num_chunks_ - 1 - pass.chunk, pass.microbatch};
  }
  // Forward passes of stage r before its first backward pass under 1F1B.
  int warm_up(int stage) const;

 private:
  int num_stages_, num_chunks_, group_size_;
  std::vector<Action> forward_;
};

}  // namespace megatron
