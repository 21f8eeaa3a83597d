// Files: read-only maps, whole-file reads, and atomic writes, which appear completely or not at
// all. Every error names the path and the system's reason.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace megatron {

// A file mapped read-only. Move-only; unmaps when destroyed. Safe to read from several threads.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(
      const std::filesystem::path& path);  // throws Error; an empty file maps to an empty span
  MappedFile(MappedFile&&) noexcept;
  MappedFile& operator=(MappedFile&&) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::filesystem::path path_;
};

// Opens a regular file for reading and returns its descriptor, which the caller closes. A FIFO, a
// socket or a device is refused without blocking. Throws Error.
int open_regular_file(const std::filesystem::path& path);

// The same for input that is read once from front to back: also accepts /dev/null and unnamed pipes
// (a shell's <(command)), and /dev/stdin is the process's standard input.
int open_input_file(const std::filesystem::path& path);

// Throws the Error that open_regular_file() would throw.
void check_regular_file(const std::filesystem::path& path);
void check_input_file(const std::filesystem::path& path);

// The whole content of anything that open_input_file() accepts, as bytes. Throws Error if it is
// longer than `most_bytes`, without reading more than that.
std::string read_file(const std::filesystem::path& path, uint64_t most_bytes = uint64_t{1} << 40);

// Calls use(line, number) for each line of a text, without its line feed; numbers count from 1. No
// line follows a line feed at the end.
template <class F>
void for_each_line_of(std::string_view text, F&& use) {
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    use(text.substr(begin, end - begin), ++number);
    begin = end + 1;
  }
}

// A buffered writer to `<path>.tmp-<pid>-<n>` that is renamed to `path` by commit(). If destroyed
// without commit() it removes the temporary file, so that no partial file is left. Not thread safe.
class AtomicFileWriter {
 public:
  explicit AtomicFileWriter(std::filesystem::path path);
  ~AtomicFileWriter();
  AtomicFileWriter(const AtomicFileWriter&) = delete;
  AtomicFileWriter& operator=(const AtomicFileWriter&) = delete;
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  uint64_t size_bytes() const;  // bytes written so far
  // Flushes, fsyncs, renames, fsyncs the folder. After it only size_bytes() may be called.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes a whole file through AtomicFileWriter.
void write_file_atomically(const std::filesystem::path& path, std::string_view contents);

// The folder for recomputable files: $XDG_CACHE_HOME/megatron or ~/.cache/megatron; empty if
// neither is known. Not created.
std::filesystem::path cache_folder();

// fsync of a file or a folder.
void sync_path(const std::filesystem::path& path);

}  // namespace megatron
