// A run by its flags, and what one training step of it allocates on the CPU.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <string>
#include <vector>

#include "megatron/tensor/torch.h"
#include "megatron/training/passes.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/parse_line.h"
#include "tests/unit/training/random_batch.h"

namespace megatron {

inline Arguments parse(const std::string& flags, int64_t world_size) {
  return parse_line("pretrain " + flags, world_size);
}

inline const std::string kRun =
    " --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 500 ";

// Of what a step allocates: a plan that says less lets a run begin that has no room. Steps of real
// size are held to 2%; of these an allocator's units are some of the bytes.
constexpr double kLeastOfStep = 0.97;

// What the allocator counts in the second of two training steps; `evaluates`: a forward over other
// samples comes before it.
inline int64_t step_peak(const Arguments& a, const Vocabulary& vocabulary,
                         const ParallelGroups& groups, bool evaluates = false) {
  const PretrainTask task = find_task(a);
  const auto meter = std::make_shared<Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  TrainedModel model =
      build_model(task, a, vocabulary, groups, model_dtype(a.optimizer), c10::kCPU, StartPoint{});
  Timers timers(0);
  const auto batch = [&] { return random_batch(a, groups); };
  train_step(model, task, step_options(a, 0), batch, timers);
  if (evaluates) run_passes(model, task, {/*num_microbatches=*/2}, batch, timers);
  meter->most = 0;
  train_step(model, task, step_options(a, 0), batch, timers);
  return meter->most;
}

}  // namespace megatron
