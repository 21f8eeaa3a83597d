// One run writes to a folder at a time: `run.lock` in it names the run's host, process and start.
//
// The owner holds flock() on the file, which the kernel gives up when the process dies, and touches
// the file every few seconds, which other machines see where flock() does not reach them (some
// network file systems). A lock is taken over when its owner is surely gone: on this machine, when
// the process no longer exists; on another one, when the file has not been touched for
// `stale_seconds` by the file server's clock, or when it belongs to an earlier attempt of the same
// job, which its scheduler has ended.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace megatron {

struct FolderLockOptions {
  std::string host;       // empty: this machine's name
  std::string run_id;     // of the job, by its scheduler; empty: unknown
  int restart_count = 0;  // how often the scheduler has started the job before
  double touch_seconds = 15;
  double stale_seconds = 180;
};

inline constexpr const char* kLockName = "run.lock";

// Holds the lock until it is destroyed. One thread touches the file meanwhile.
class FolderLock {
 public:
  // Creates the folder where it is missing. Throws Error that names host, process and start of the
  // owner when another run has it: RetryError when that run may be on a machine that is gone.
  explicit FolderLock(const std::filesystem::path& folder, FolderLockOptions options = {});
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // The owner whose lock was taken over: "process 4711 on node3 since 2026-11-22 14:03:11 UTC";
  // empty: there was none.
  const std::string& previous_owner() const;
  // Throws Error when another run has taken the lock meanwhile: this one was stopped for too long.
  // Called before what would damage the other run.
  void check() const;
  // Gives the lock up; for a process that ends without destructors. Safe to call from another
  // thread, once.
  void release();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
