// outcome.json in the folder of a run: how the run ended, for schedulers and people
// (docs/training.md, "How a run ends").
//
// It says "running" from the start on; if that process no longer exists, the run was ended without
// notice (kill -9, a lost machine). One member per line, so that scripts need no JSON parser.
// Written atomically.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "megatron/base/failure_class.h"

namespace megatron {

class JsonWriter;

inline constexpr const char* kOutcomeName = "outcome.json";

enum class RunEnd { kFinished, kStopped };

// Outcome of earlier attempts in the same folder.
struct PreviousOutcome {
  int64_t attempt = 0;          // 0: none
  double seconds_per_save = 0;  // the longest save; 0: unknown
};

struct OutcomeLastWords;

// The outcome of the last run in the folder; default values if it is missing or cannot be read.
PreviousOutcome read_previous_outcome(const std::filesystem::path& folder);

// One per process. Also writes if the process crashes or is ended by a second signal. Thread safe
// after begin().
class RunOutcome {
 public:
  // `rank`: of this process. Does not write yet.
  RunOutcome(std::filesystem::path folder, int rank, int restart_count);
  ~RunOutcome();
  RunOutcome(const RunOutcome&) = delete;
  RunOutcome& operator=(const RunOutcome&) = delete;

  const PreviousOutcome& previous() const { return previous_; }

  // Call at the start of the run: writes "running". Throws Error.
  void begin();
  // For ranks that did not call begin(): fail() writes only while the file of this attempt says
  // "running".
  void follow(int64_t attempt);
  int64_t attempt() const { return attempt_; }
  void set_iteration(int64_t iteration) { iteration_ = iteration; }
  // Call when a checkpoint has been published, and with the one that the run starts from. Written
  // at the next write.
  void set_saved(int64_t iteration, const std::string& directory, double seconds);

  // Records the end. Failures to write are logged. Only the first call of end() or fail() has an
  // effect. `rank`: the one that failed.
  void end(RunEnd end, int exit_code, const std::string& reason);
  void fail(FailureClass failure, int rank, const std::string& reason);

 private:
  std::string text(const char* outcome, const char* failure, const int* exit_code, int failed_rank,
                   const std::string& reason) const;
  void write_end(const std::string& text) const;
  void write_in_place(const std::string& text) const;
  bool another_has_written() const;
  void add_identity(JsonWriter& json) const;
  void prepare_last_words();

  const std::filesystem::path folder_;
  const int rank_;
  const int restart_count_;
  const PreviousOutcome previous_;
  int64_t attempt_;
  const double started_;
  std::atomic<int64_t> iteration_{0};
  mutable std::mutex mutex_;
  int64_t saved_iteration_ = -1;
  std::string saved_directory_;
  double seconds_per_save_ = 0;
  bool begun_ = false, follows_ = false, ended_ = false;
  // What a signal handler would write. Old ones are kept (one per checkpoint), because a handler
  // may still be reading them.
  std::vector<std::unique_ptr<OutcomeLastWords>> last_words_;
};

// Writes the outcome of a process that `signal` ends now, if it has a RunOutcome;
// async-signal-safe.
void write_outcome_of_signal(int signal);

}  // namespace megatron
