// An append-only file of whole records, used for metrics.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace megatron {

// Not thread safe. Not buffered: what append() has written survives the process.
class AppendFile {
 public:
  // Opens `path` for appending; creates the file and its folder if missing. Throws Error, also if
  // the path is not a regular file (a FIFO is refused without waiting).
  explicit AppendFile(std::filesystem::path path);
  ~AppendFile();
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&&) = delete;

  // Writes all of `bytes`, or nothing: a partial write is truncated. Throws Error with the system's
  // reason, also if the file has been deleted since it was opened.
  void append(std::string_view bytes);
  uint64_t size() const;  // bytes
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace megatron
