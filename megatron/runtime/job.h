// One rank of a job: its process groups, and how all ranks end when one of them fails.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "megatron/comm/failure_monitor.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/rank_settings.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/runtime/device_choice.h"
#include "megatron/runtime/section_clock.h"

namespace megatron {

struct Job {
  ParallelGroups groups;
  Agreement* agreement = nullptr;  // exchanges strings among all ranks; null: one rank
  int local_rank = 0;              // rank within this machine
  int local_world_size = 1;        // ranks on this machine
  // Receives the wait times of the groups; null: times are not measured
  std::shared_ptr<SectionClock> clock;
  // To be called after the first step: timeouts may then be shorter. May be empty
  std::function<void()> after_first_step;
  Launch launch;  // the launcher's environment
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  // Registers a callback for the failure of any rank (FailureMonitor::when_failed). Empty with one
  // rank.
  std::function<void(std::function<void(const JobFailure&)>)> when_failed;
  bool is_first() const { return groups.world.rank() == 0; }
};

// Runs `body`; errors of devices and of communication libraries become RetryError.
int with_own_errors(const std::function<int()>& body);

// What a process must know to take part in a job, whatever it is for.
struct RuntimeOptions {
  CommConfig comm;
  ParallelConfig parallel;  // must divide launch.world_size, less the encoders' ranks
  EncoderRanks encoder;
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
