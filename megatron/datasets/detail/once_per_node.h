// Results of reading whole files, computed by one process per node: other processes, and later
// starts, reuse its result as long as the files do not change.
#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace megatron {

// Holds an exclusive lock on a file until destroyed.
class FileLock {
 public:
  explicit FileLock(const std::filesystem::path& path);  // waits; throws Error
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock();

 private:
  int fd_;
};

struct NodeResult {
  std::string text;
  bool computed_here = false;
};

// The result of `compute`, a text that depends only on the content of `files`. It is stored in
// <folder>/<name>-checked.txt, where `folder` is the first writable one of `folders`, with size,
// inode and modification times of each file, and reused while those are unchanged. Concurrent
// processes wait for the first one. Errors of `compute` are rethrown and not stored. If no folder
// is writable, `compute` runs.
NodeResult once_per_node(std::span<const std::filesystem::path> folders, const std::string& name,
                         std::span<const std::filesystem::path> files,
                         const std::function<std::string()>& compute);

}  // namespace megatron
