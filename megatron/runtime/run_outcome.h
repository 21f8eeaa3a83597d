// outcome.json in the folder of a run: how the run ended, for schedulers and people
// (docs/training.md, "How a run ends").
//
// It says "running" from the start on, so that a run that was ended without a word (kill -9, a lost
// machine) is one whose process no longer exists. One member per line, so that scripts need no JSON
// reader. Written completely or not at all.
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

// What earlier attempts in the same folder left.
struct PreviousOutcome {
  int64_t attempt = 0;          // 0: there was none
  double seconds_per_save = 0;  // the longest save; 0: unknown
};

struct OutcomeLastWords;

// The outcome of the last run in the folder; nothing where it is missing or cannot be read.
PreviousOutcome read_previous_outcome(const std::filesystem::path& folder);

// One per process. It also writes when the process crashes or is ended by a second signal. Thread
// safe once begun.
class RunOutcome {
 public:
  // `rank`: of this process. Writes nothing yet.
  RunOutcome(std::filesystem::path folder, int rank, int restart_count);
  ~RunOutcome();
  RunOutcome(const RunOutcome&) = delete;
  RunOutcome& operator=(const RunOutcome&) = delete;

  const PreviousOutcome& previous() const { return previous_; }

  // The run begins: writes "running". Throws Error.
  void begin();
  // Another rank has begun this attempt: fail() writes only while its file says "running".
  void follow(int64_t attempt);
  int64_t attempt() const { return attempt_; }
  void set_iteration(int64_t iteration) { iteration_ = iteration; }
  // A checkpoint has been published, or is what the run starts from. Known at the next write.
  void set_saved(int64_t iteration, const std::string& directory, double seconds);

  // The end. Failures to write are logged. Only the first call of these two counts. `rank`: the one
  // that failed.
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
  // What a signal handler would write. All are kept, because a handler may be reading the one
  // before; there is one per checkpoint.
  std::vector<std::unique_ptr<OutcomeLastWords>> last_words_;
};

// Writes the outcome of a process that `signal` ends now, when one is being kept; may be called in
// a handler.
void write_outcome_of_signal(int signal);

}  // namespace megatron
