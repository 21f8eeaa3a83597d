// Ensures that one run at a time writes to a folder: `run.lock` in it names the run's host, process
// and start.
//
// The owner holds flock() on the file, which the kernel releases when the process dies, and touches
// the file every few seconds, for machines that do not see the flock() (some network file systems).
// A lock is taken over if its owner is certainly gone: on this machine, if the process no longer
// exists; on another one, if the file has not been touched for `stale_seconds` by the file server's
// clock, or if it belongs to an earlier attempt of the same job, which its scheduler has ended.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace megatron {

struct FolderLockOptions {
  std::string host;       // empty: this machine's name
  std::string run_id;     // the scheduler's id of the job; empty: unknown
  int restart_count = 0;  // how often the scheduler has started the job before
  double touch_seconds = 15;
  double stale_seconds = 180;
};

inline constexpr const char* kLockName = "run.lock";

// Holds the lock until it is destroyed. A thread of its own touches the file.
class FolderLock {
 public:
  // Creates the folder if it is missing. Throws Error naming host, process and start of the owner
  // if another run has the lock: RetryError if that run's machine may be gone.
  explicit FolderLock(const std::filesystem::path& folder, FolderLockOptions options = {});
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // The owner whose lock was taken over: "process 4711 on node3 since 2026-11-22 14:03:11 UTC";
  // empty: there was none.
  const std::string& previous_owner() const;
  // Throws Error if another run has taken over the lock because this one was suspended for too
  // long. Call it before writing anything that would damage the other run.
  void check() const;
  // Releases the lock; for a process that ends without destructors. May be called from another
  // thread, once.
  void release();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
