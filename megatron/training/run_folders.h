// The folders that a run writes to, while it has them: their locks (folder_lock.h) and outcome.json
// (run_outcome.h).
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
  // outcome.json. Throws Error on the first rank when another run has one of them. Without folders
  // nothing is done.
  RunFolders(const TrainingConfig& config, const Job& job);

  // Throws Error on the first rank when another run has taken a folder over.
  void check() const;
  void set_iteration(int64_t iteration);
  void set_saved(int64_t iteration, const std::string& directory, double seconds);
  // Seconds of the longest save by earlier attempts; 0: unknown.
  double seconds_per_save() const;

  // The end, for outcome.json: the first rank writes it. A failure among several ranks is written
  // by the job's FailureMonitor, which knows the rank.
  void ended(RunEnd end, int exit_code, const std::string& reason);
  void failed(const std::exception& error);

 private:
  struct State;
  bool first_;
  bool alone_;
  std::shared_ptr<State> state_;  // also of the failure monitor's thread
};

}  // namespace megatron
