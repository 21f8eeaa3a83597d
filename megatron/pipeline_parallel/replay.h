// Replays a schedule against its data dependencies: proves that it ends, that it does everything
// exactly once in a legal order, and tells how long it takes and what it holds. Without libtorch.
#pragma once

#include <vector>

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// When receives are posted, as executor.h does. Nothing is buffered on the way: a message moves
// when it is made, its receive is posted and the ones before it on its link have moved. Nobody
// waits for a send.
enum class TransferMode : uint8_t {
  kOverlapped,  // the next action's receive before an action computes
  kOnDemand,    // when the action that needs it is next
  kBlocking,    // as kOverlapped, and a call of all stages holds up who makes it until all have, as
                // between threads
};

struct ReplayedAction {
  Action action;
  double start = 0, end = 0;
};

struct ReplayedStage {
  std::vector<ReplayedAction> actions;
  double busy = 0;
  // Most passes of one chunk at a time ...
  // ... that are past F and not yet past B or W: whose activations are held
  int peak_activations = 0;
  // ... that are past F and not yet past B or I: slots of a captured forward pass
  int peak_awaiting_gradient = 0;
  int peak_pending_weight = 0;  // ... that are past I and not yet past W
  double bubble(double makespan) const { return makespan > 0 ? 1 - busy / makespan : 0; }
};

struct Replay {
  std::vector<ReplayedStage> stages;
  double makespan = 0;
  // Idle part of all stages' time, from the start of the first to the end of the last
  double bubble_fraction = 0;
  int peak_activations() const;
};

// Throws InternalError, naming stage and action, when the schedule deadlocks, leaves out or repeats
// a pass, or runs one before its own forward pass.
Replay replay(const Schedule& schedule, const ScheduleCosts& costs = {},
              TransferMode mode = TransferMode::kOverlapped);

}  // namespace megatron
