// What the ranks of a run tell each other for the log, besides the report of every step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/reporting/slow_ranks.h"
#include "megatron/runtime/device.h"
#include "megatron/training/train_step.h"

namespace megatron {

// Of all ranks, in rank order, on every rank. Collective over `world`; waits for the device.
RankTimers gather_timers(const ProcessGroup& world, c10::Device device, const Timers& timers);
std::vector<MemoryUse> gather_memory(const ProcessGroup& world, c10::Device device);

// Names a rank that is slower than those that do the same work, at most once in `interval` steps.
class SlowRankWatch {
 public:
  // Collective over groups.world.
  SlowRankWatch(const ParallelGroups& groups, c10::Device device, int64_t interval);

  // After each step, with what its outcome brought. A line to log, or nothing.
  std::optional<std::string> step(int64_t iteration, const StepNumbers& numbers);

 private:
  std::vector<std::string> hosts_;  // by rank; empty: all ranks are on one
  std::optional<SlowRanks> ranks_;
  const int64_t interval_;
  std::optional<int64_t> named_;  // the step of the last line
};

}  // namespace megatron
