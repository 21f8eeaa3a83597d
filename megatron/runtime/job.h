// This process among those that run a job: its groups, and what ends every rank when one of them
// fails.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "megatron/comm/failure_monitor.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/rank_settings.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/runtime/device_choice.h"
#include "megatron/runtime/section_clock.h"

namespace megatron {

struct Job {
  ParallelGroups groups;
  Agreement* agreement = nullptr;  // of all ranks, for texts; null: one rank
  int local_rank = 0;              // among the ranks of this machine
  int local_world_size = 1;        // how many those are
  // That the groups tell of their waits; null: times are not measured
  std::shared_ptr<SectionClock> clock;
  // start-up is over: time limits may get shorter. May be empty
  std::function<void()> after_first_step;
  Launch launch;  // who started this rank
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  // Takes what is called when any rank has failed (FailureMonitor::when_failed). Empty with one
  // rank.
  std::function<void(std::function<void(const JobFailure&)>)> when_failed;
  bool is_first() const { return groups.world.rank() == 0; }
};

// Runs `body`; errors of devices and of communication libraries become RetryError.
int with_own_errors(const std::function<int()>& body);

// What a process must know to take part in a job, whatever it is for.
struct RuntimeOptions {
  CommConfig comm;
  ParallelConfig parallel;  // must divide launch.world_size
  int query_groups = 1;     // of the attention layers, which tensor ranks may share
  DeviceChoice device = DeviceChoice::kAuto;
  bool gemm_tuning = true;
  // What must be the same on every rank (shared_settings.h); asked for when there are several.
  std::function<RankSettings()> settings = [] { return RankSettings(); };
};

// Runs `body` as one rank of the job that the launcher's environment describes (torchrun, srun,
// mpirun; none: one rank) and returns what it returns. Meets the other ranks first: all start with
// the same settings, or none does. When any rank throws, dies or hangs, every rank leaves with the
// exit code of that failure (base/exit_codes.h) and one of them says why; see
// comm/failure_monitor.h.
int run_job(const Launch& launch, const RuntimeOptions& options,
            const std::function<int(const Job&)>& body);

}  // namespace megatron
