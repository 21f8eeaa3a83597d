// Temporary directories and their owners: `<name>.tmp-<host>-<pid>-<start>-<n>`.
//
// The owner holds a lock on the directory while it lives. A leftover is removed only if its owner
// is certainly gone: its process (host, pid and start time) does not exist and no process holds the
// lock; for another host, if nothing in it was modified for a day.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace megatron {

inline constexpr const char* kTemporaryInfix = ".tmp-";

// A name next to `path` that no other writer uses.
std::filesystem::path temporary_path(const std::filesystem::path& path);

// Holds the lock on a directory until destroyed. On file systems without locks, only the process
// identity counts.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

// The process that writes, or wrote, a path with a temporary name: those of this file, and
// `<name>.tmp-<pid>-<n>` of base/files.h.
struct WriterState {
  std::string name;  // "process 4711 on node3"
  bool alive = false;
  bool gone = false;  // certainly; neither flag: unknown
};

// Nullopt: not a temporary name.
std::optional<WriterState> writer_of(const std::filesystem::path& path);

// Leftovers of checkpoints and of the hint file in the folder whose owners are gone.
std::vector<std::filesystem::path> dead_leftovers(const std::filesystem::path& root);

}  // namespace megatron
