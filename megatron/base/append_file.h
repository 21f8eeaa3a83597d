// A file that grows by whole records: what metrics are written to.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace megatron {

// Not thread safe. Nothing is buffered: what append() has written survives the process.
class AppendFile {
 public:
  // Opens `path` for appending and creates it, and its folder, when missing. Throws Error; so does
  // what is no regular file (a FIFO is refused, not waited for).
  explicit AppendFile(std::filesystem::path path);
  ~AppendFile();
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&&) = delete;

  // Writes all of `bytes`, or nothing: what a failed write left is cut off again. Throws Error with
  // the system's reason, or when the file has been deleted since it was opened.
  void append(std::string_view bytes);
  uint64_t size() const;  // bytes
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace megatron
