// Replays a schedule against its data dependencies: proves that it terminates and runs every pass
// exactly once in a legal order, and computes its duration and peak memory. Without libtorch.
#pragma once

#include <vector>

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// When receives are posted, modelling executor.h. Links have no buffers: a message is transferred
// once it is produced, its receive is posted and earlier messages on its link have been
// transferred. No stage waits for a send.
enum class TransferMode : uint8_t {
  kOverlapped,  // the next action's receive is posted before an action computes
  kOnDemand,    // posted when the action that needs it is next
  kBlocking,    // as kOverlapped, but collectives block a stage until all have arrived (threads)
};

struct ReplayedAction {
  Action action;
  double start = 0, end = 0;
};

struct ReplayedStage {
  std::vector<ReplayedAction> actions;
  double busy = 0;
  // Peak number of passes of one chunk ...
  // ... that are past F and not yet past B or W: whose activations are held
  int peak_activations = 0;
  // ... that are past F and not yet past B or I: slots for captured forward graphs
  int peak_awaiting_gradient = 0;
  int peak_pending_weight = 0;  // ... that are past I and not yet past W
  double bubble(double makespan) const { return makespan > 0 ? 1 - busy / makespan : 0; }
};

struct Replay {
  std::vector<ReplayedStage> stages;
  double makespan = 0;
  // Idle fraction of all stages' time, from the first start to the last end
  double bubble_fraction = 0;
  int peak_activations() const;
};

// Throws InternalError that names stage and action if the schedule deadlocks, omits or repeats a
// pass, or runs one before its own forward pass.
Replay replay(const Schedule& schedule, const ScheduleCosts& costs = {},
              TransferMode mode = TransferMode::kOverlapped);

}  // namespace megatron
