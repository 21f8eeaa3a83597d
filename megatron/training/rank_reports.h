// Data that ranks exchange for the log, besides the report of every step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/reporting/slow_ranks.h"
#include "megatron/runtime/device.h"
#include "megatron/training/train_step.h"

namespace megatron {

// Timers of all ranks, in rank order, on every rank. Collective over `world`; waits for the device.
RankTimers gather_timers(const ProcessGroup& world, c10::Device device, const Timers& timers);
std::vector<MemoryUse> gather_memory(const ProcessGroup& world, c10::Device device);

// Reports a rank that is slower than its peers (ranks with the same work), at most once in
// `interval` steps.
class SlowRankWatch {
 public:
  // `encodes`: this rank is one of the encoders' own, which are peers. Collective over
  // groups.world.
  SlowRankWatch(const ParallelGroups& groups, c10::Device device, int64_t interval,
                bool encodes = false);

  // Call after each step with its numbers. Returns a line to log, or nothing.
  std::optional<std::string> step(int64_t iteration, const StepNumbers& numbers);

 private:
  std::vector<std::string> hosts_;  // by rank; empty: all ranks are on one
  std::optional<SlowRanks> ranks_;
  const int64_t interval_;
  std::optional<int64_t> named_;  // step of the last report
};

}  // namespace megatron
