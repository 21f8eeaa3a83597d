// Locks (folder_lock.h) and outcome.json (run_outcome.h) of the folders that a run writes to.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "megatron/runtime/job.h"
#include "megatron/runtime/run_outcome.h"
#include "megatron/training/arguments/training_config.h"

namespace megatron {

class RunFolders {
 public:
  // Every rank of the job calls it; the first one locks --save and --run-dir and writes
  // outcome.json. Throws Error on the first rank if another run has locked one of them. Does
  // nothing without folders.
  RunFolders(const TrainingConfig& config, const Job& job);

  // Throws Error on the first rank if another run has taken over a folder.
  void check() const;
  void set_iteration(int64_t iteration);
  void set_saved(int64_t iteration, const std::string& directory, double seconds);
  // Longest save of earlier attempts in seconds; 0: unknown.
  double seconds_per_save() const;

  // Records the end in outcome.json, on the first rank. With several ranks, a failure is recorded
  // through the job's FailureMonitor, which knows the failed rank.
  void ended(RunEnd end, int exit_code, const std::string& reason);
  void failed(const std::exception& error);

 private:
  struct State;
  bool first_;
  bool alone_;
  std::shared_ptr<State> state_;  // shared with the failure monitor's thread
};

}  // namespace megatron
