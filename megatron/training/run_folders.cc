#include "megatron/training/run_folders.h"

#include <filesystem>
#include <optional>
#include <set>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/base/process_signals.h"
#include "megatron/runtime/folder_lock.h"

namespace megatron {
namespace {

// Identifies a job across its attempts; empty: the launcher has no such id.
std::string job_name(const Launch& launch) {
  if (launch.run_id == "none") return "";  // torchrun's default
  // Slurm step numbers restart with every attempt.
  return launch.launcher == "srun" ? launch.run_id.substr(0, launch.run_id.rfind('-'))
                                   : launch.run_id;
}

std::vector<std::filesystem::path> folders_of(const TrainingConfig& config) {
  std::vector<std::filesystem::path> folders;
  std::set<std::filesystem::path> seen;
  for (const std::string& folder : {config.save, config.run_folder()}) {
    std::error_code ignored;
    if (!folder.empty() && seen.insert(std::filesystem::weakly_canonical(folder, ignored)).second)
      folders.emplace_back(folder);
  }
  return folders;
}

}  // namespace

struct RunFolders::State {
  std::vector<std::unique_ptr<FolderLock>> locks;
  std::optional<RunOutcome> outcome;
};

RunFolders::RunFolders(const TrainingConfig& config, const Job& job)
    : first_(job.is_first()),
      alone_(job.groups.world.size() == 1),
      state_(std::make_shared<State>()) {
  if (config.run_folder().empty()) return;
  FolderLockOptions options;
  options.run_id = job_name(job.launch);
  options.restart_count = job.launch.restart_count;
  for (const std::filesystem::path& folder : folders_of(config)) {
    if (!first_) break;
    state_->locks.push_back(std::make_unique<FolderLock>(folder, options));
    const std::string& owner = state_->locks.back()->previous_owner();
    if (!owner.empty())
      log_info(cat("the run before in ", folder.string(), " ended without a word: ", owner));
  }
  state_->outcome.emplace(config.run_folder(), job.groups.world.rank(), job.launch.restart_count);
  if (first_) {
    state_->outcome->begin();
    set_crash_hook(write_outcome_of_signal);
  }
  // Other ranks may write the outcome if the first rank is lost, but never into a folder whose lock
  // it did not get.
  if (job.agreement != nullptr) {
    const std::string attempt =
        job.agreement->broadcast(std::to_string(state_->outcome->attempt()));
    if (!first_) state_->outcome->follow(std::stoll(attempt));
  }
  if (!job.when_failed) return;
  job.when_failed([state = state_](const JobFailure& failure) {
    state->outcome->fail(failure.failure, failure.culprit, failure.text);
    for (const auto& lock : state->locks) lock->release();
  });
}

void RunFolders::check() const {
  for (const auto& lock : state_->locks) lock->check();
}

void RunFolders::set_iteration(int64_t iteration) {
  if (state_->outcome) state_->outcome->set_iteration(iteration);
}

void RunFolders::set_saved(int64_t iteration, const std::string& directory, double seconds) {
  if (state_->outcome) state_->outcome->set_saved(iteration, directory, seconds);
}

double RunFolders::seconds_per_save() const {
  return state_->outcome ? state_->outcome->previous().seconds_per_save : 0;
}

void RunFolders::ended(RunEnd end, int exit_code, const std::string& reason) {
  if (state_->outcome && first_) state_->outcome->end(end, exit_code, reason);
}

void RunFolders::failed(const std::exception& error) {
  if (state_->outcome && alone_) state_->outcome->fail(failure_class(error), 0, error.what());
}

}  // namespace megatron
