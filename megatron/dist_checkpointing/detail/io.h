// System calls on files: loops over EINTR and short transfers, errors that name path and reason,
// and one seam where tests inject failures and record what was done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace megatron {

enum class IoOp { kMkdir, kOpen, kAllocate, kWrite, kSync, kRename, kUnlink, kRead, kStat };

// Called before each operation on a path (`to` only for renames). Returns 0 to go on, an errno to
// fail with it, or kIoShort to transfer less than was asked. For tests; called from any thread.
inline constexpr int kIoShort = -1;
using IoHook =
    std::function<int(IoOp op, const std::filesystem::path& path, const std::filesystem::path& to)>;
void set_io_hook(IoHook hook);  // empty: none. Not while files are in use.

// Throws Error "cannot <what> <path>: <reason>" with a hint where one helps; an AccessError unless
// is_damage(error).
[[noreturn]] void throw_io_error(const std::string& what, const std::filesystem::path& path,
                                 int error);

// A new file, written from begin to end. The destructor closes without a check; sync_and_close() is
// the successful end.
class OutputFile {
 public:
  // `expected_bytes` is reserved at once where the file system can, so that a full disk shows
  // early.
  explicit OutputFile(std::filesystem::path path, uint64_t expected_bytes = 0);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(const void* data, size_t bytes);
  // Asks the system to begin writing what is in its cache and waits for what it was asked for
  // before, so that the sync at the end is short however large the file is.
  void write_back();
  void sync_and_close();

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t written_ = 0, begun_ = 0, done_ = 0;  // bytes: written; being written back; written back
};

// A file opened for positioned reads; safe to use from several threads. What is no regular file (a
// FIFO, a device, a folder) is refused without waiting for it.
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

// Whether there is something of this name. Throws AccessError where that cannot be told.
bool path_exists(const std::filesystem::path& path);
// The size of a regular file, which is not opened.
uint64_t regular_file_size(const std::filesystem::path& path);

void make_directory(const std::filesystem::path& path);    // fails when it exists
void make_directories(const std::filesystem::path& path);  // and missing parents, each made durable
void sync_directory(const std::filesystem::path& path);
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);
// Swaps two directories in one step where the file system can, else returns false.
bool exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b);
// Nothing to remove is no error. `progress` is called after each entry of the folder.
void remove_tree(const std::filesystem::path& path, const std::function<void()>& progress = {});

}  // namespace megatron
