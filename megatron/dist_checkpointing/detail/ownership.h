// Temporary directories and who owns them: `<name>.tmp-<host>-<pid>-<start>-<n>`.
//
// The owner holds a lock on the directory while it lives. A leftover is removed only when its owner
// is surely gone: its process (host, pid and start time) does not exist and nobody holds the lock;
// on another host, when nothing in it was modified for a day.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace megatron {

inline constexpr const char* kTemporaryInfix = ".tmp-";

// A name next to `path` that no other writer uses.
std::filesystem::path temporary_path(const std::filesystem::path& path);

// Holds the lock on a directory until destroyed. Where the file system cannot lock, the process
// identity alone counts.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::filesystem::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

// Who writes, or wrote, what bears a temporary name: those of this file, and `<name>.tmp-<pid>-<n>`
// of base/files.h.
struct WriterState {
  std::string name;  // "process 4711 on node3"
  bool alive = false;
  bool gone = false;  // surely; neither: nobody can tell
};

// Nothing: the name is no temporary one.
std::optional<WriterState> writer_of(const std::filesystem::path& path);

// Leftovers in the folder whose owners are gone: of checkpoints and of the hint file.
std::vector<std::filesystem::path> dead_leftovers(const std::filesystem::path& root);

}  // namespace megatron
