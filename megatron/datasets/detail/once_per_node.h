// What one process of a node finds out by reading files in full, for all of them: the others, and
// later starts, take its result as long as the files stay the same.
#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace megatron {

// Holds an exclusive lock on a file while it lives.
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

// The result of `compute`, a text that depends on the content of `files` alone. It is kept in
// <folder>/<name>-checked.txt, where `folder` is the first of `folders` that can be written, with
// size, inode and times of change of each file; while those are the same it is taken from there.
// Processes that come at the same time wait for the first one. Errors of `compute` pass through
// and are not kept. Where no folder can be written, `compute` runs.
NodeResult once_per_node(std::span<const std::filesystem::path> folders, const std::string& name,
                         std::span<const std::filesystem::path> files,
                         const std::function<std::string()>& compute);

}  // namespace megatron
