// What the engine drives on each rank: a model with its cache, states and weights, that executes
// plans. Without libtorch, so that the engine is tested against fakes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "megatron/scheduling/commands.h"
#include "megatron/scheduling/runner_facts.h"
#include "megatron/scheduling/step_plan.h"

namespace megatron {

// One thing that all ranks do between two steps.
struct SuspendRunner {
  SuspendCommand levels;
};
struct ResumeRunner {};  // cache and weights back on the device; also takes a suspension back
struct StageWeights {    // reads new weights next to the current ones; checks names and shapes
  std::string source;
};
struct CommitWeights {  // the staged weights become the current ones
  int64_t version = 0;
};
struct DiscardWeights {};  // forgets staged weights; nothing to do without
using RunnerTransition =
    std::variant<SuspendRunner, ResumeRunner, StageWeights, CommitWeights, DiscardWeights>;

// Called by one thread. An exception from any call means that the rank has failed, unless said
// otherwise.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  virtual const RunnerFacts& facts() const = 0;

  // Queues a step and returns without waiting for the device. Plans come in the order of their
  // steps; several may be in flight. Communicates with the other ranks of the model.
  virtual void launch(const StepPlan& plan) = 0;
  // The result of the oldest step that was launched and not taken; null: not known after `wait_ns`
  // (0: does not wait). Draws and scores are empty on other ranks than 0.
  virtual std::optional<StepResult> take(int64_t wait_ns) = 0;

  // Begins a transition; no step is in flight, and no other transition. Returns at once.
  virtual void begin(const RunnerTransition& transition) = 0;
  // The outcome: "" or why it failed, in which case this rank is as it was before; null: not known
  // after `wait_ns`. A StageWeights that fails leaves nothing staged.
  virtual std::optional<std::string> poll(int64_t wait_ns) = 0;
};

}  // namespace megatron
