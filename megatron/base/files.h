// Files: read-only maps, whole-file reads, and writes that appear completely or not at all.
// Every error names the path and the system's reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace megatron {

// A file mapped read-only. Moves; unmaps when destroyed. Safe to read from several threads.
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
// socket or a device is refused at once, never waited for. Throws Error.
int open_regular_file(const std::filesystem::path& path);

// The same for what is read once from front to back: besides regular files it takes /dev/null and
// pipes without a name (a shell's <(command), which has a writer), and /dev/stdin is whatever this
// process was given.
int open_input_file(const std::filesystem::path& path);

// Throws the Error that opening would throw.
void check_regular_file(const std::filesystem::path& path);
void check_input_file(const std::filesystem::path& path);

// The whole content of what open_input_file() takes, as bytes. Throws Error when it is longer than
// `most_bytes`, before more than that is read.
std::string read_file(const std::filesystem::path& path, uint64_t most_bytes = uint64_t{1} << 40);

// A buffered writer to `<path>.tmp-<pid>-<n>` that is renamed to `path` by commit(). Destroyed
// without commit() it removes the temporary file, so that nothing half-written is left behind. Not
// thread safe.
class AtomicFileWriter {
 public:
  explicit AtomicFileWriter(std::filesystem::path path);
  ~AtomicFileWriter();
  AtomicFileWriter(const AtomicFileWriter&) = delete;
  AtomicFileWriter& operator=(const AtomicFileWriter&) = delete;
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  uint64_t size_bytes() const;  // written so far
  // Flushes, fsyncs, renames, fsyncs the folder. After it only size_bytes() may be called.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes a whole file through AtomicFileWriter.
void write_file_atomically(const std::filesystem::path& path, std::string_view contents);

// Where what can be computed again is kept: $XDG_CACHE_HOME/megatron or ~/.cache/megatron; empty
// when neither is known. Not created.
std::filesystem::path cache_folder();

// fsync of a file or a folder.
void sync_path(const std::filesystem::path& path);

}  // namespace megatron
