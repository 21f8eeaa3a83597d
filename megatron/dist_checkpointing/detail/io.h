// System calls on files: retries after EINTR and short transfers, errors that name path and reason,
// and one hook where tests inject failures and record operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace megatron {

inline constexpr size_t kMaxOpenFiles = 128;  // that a reader holds at a time

enum class IoOp { kMkdir, kOpen, kAllocate, kWrite, kSync, kRename, kUnlink, kRead, kStat };

// Called before each operation on a path (`to` only for renames). Returns 0 to continue, an errno
// to fail with, or kIoShort to transfer less than requested. For tests; called from any thread.
inline constexpr int kIoShort = -1;
using IoHook =
    std::function<int(IoOp op, const std::filesystem::path& path, const std::filesystem::path& to)>;
void set_io_hook(IoHook hook);  // empty: none. Not while files are in use.

// Throws Error "cannot <what> <path>: <reason>", with a hint if there is one; an AccessError unless
// is_damage(error).
[[noreturn]] void throw_io_error(const std::string& what, const std::filesystem::path& path,
                                 int error);

// A new file, written sequentially. The destructor closes without error checks; sync_and_close() is
// the successful end.
class OutputFile {
 public:
  // Reserves `expected_bytes` at once if the file system supports it, so that a full disk is
  // noticed early.
  explicit OutputFile(std::filesystem::path path, uint64_t expected_bytes = 0);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(const void* data, size_t bytes);
  // Starts write-back of cached data and waits for the previously started one, so that the sync at
  // the end is short however large the file is.
  void write_back();
  void sync_and_close();

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t written_ = 0, begun_ = 0, done_ = 0;  // bytes: written; being written back; written back
};

// A file opened for positioned reads; safe to use from several threads. Anything but a regular file
// (a FIFO, a device, a folder) is refused without blocking.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  const std::filesystem::path& path() const { return path_; }
  uint64_t size() const { return size_; }
  void read_at(uint64_t offset, void* out, size_t bytes) const;  // throws when the file is shorter
  void forget_cached_pages() const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

// Whether the path exists. Throws AccessError if that cannot be determined.
bool path_exists(const std::filesystem::path& path);
std::vector<std::filesystem::path> paths_in(const std::filesystem::path& folder);
// The size of a regular file, without opening it.
uint64_t regular_file_size(const std::filesystem::path& path);

void make_directory(const std::filesystem::path& path);  // fails if it exists
// also missing parents; each is made durable
void make_directories(const std::filesystem::path& path);
void sync_directory(const std::filesystem::path& path);
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);
// Swaps two directories atomically if the file system supports it, else returns false.
bool exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b);
// A missing path is no error. `progress` is called after each entry of the folder.
void remove_tree(const std::filesystem::path& path, const std::function<void()>& progress = {});

}  // namespace megatron
