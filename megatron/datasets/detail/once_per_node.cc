#include "megatron/datasets/detail/once_per_node.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostBytes = uint64_t{64} << 20;

int64_t nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

struct FileStates {
  std::string text;         // states of all files; empty: one is not accessible
  int64_t last_change = 0;  // in nanoseconds since 1970
};

FileStates states_of(std::span<const fs::path> files) {
  FileStates states;
  for (const fs::path& file : files) {
    struct stat status;
    if (::stat(file.c_str(), &status) != 0) return {};
    states.text += cat(file.filename().string(), " ", status.st_size, " ", status.st_ino, " ",
                       nanoseconds(status.st_mtim), " ", nanoseconds(status.st_ctim), "\n");
    states.last_change = std::max(states.last_change, nanoseconds(status.st_ctim));
  }
  return states;
}

// File system timestamps have a resolution of milliseconds: a file that changed in this tick could
// change again without a trace.
void wait_for_next_tick(int64_t last_change) {
  constexpr int64_t kTick = 20'000'000;
  const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  const int64_t rest = std::clamp<int64_t>(last_change + kTick - now, 0, kTick);
  std::this_thread::sleep_for(std::chrono::nanoseconds(rest));
}

std::string checksum_line(std::string_view text) {
  return cat("checksum ", XXH3_64bits(text.data(), text.size()), "\n");
}

// The result stored in `path` for these files.
std::optional<std::string> kept(const fs::path& path, const std::string& states) {
  std::error_code ignored;
  if (states.empty() || !fs::is_regular_file(path, ignored)) return std::nullopt;
  try {
    const std::string text = read_file(path, kMostBytes);
    if (!text.starts_with(states)) return std::nullopt;
    const size_t end = text.rfind("\nchecksum ");
    if (end == std::string::npos || end < states.size()) return std::nullopt;
    if (text.substr(end + 1) != checksum_line(std::string_view(text).substr(0, end + 1)))
      return std::nullopt;
    return text.substr(states.size(), end - states.size());
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool make_writable(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  return !error && ::access(folder.c_str(), W_OK | X_OK) == 0;
}

}  // namespace

FileLock::FileLock(const fs::path& path)
    : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666)) {
  MEGATRON_CHECK(fd_ >= 0, path.string(), ": cannot open: ", std::strerror(errno));
  while (::flock(fd_, LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    ::close(fd_);
    throw_error(cat(path.string(), ": cannot lock: ", std::strerror(error)));
  }
}

FileLock::~FileLock() { ::close(fd_); }

NodeResult once_per_node(std::span<const fs::path> folders, const std::string& name,
                         std::span<const fs::path> files,
                         const std::function<std::string()>& compute) {
  const std::string file = name + "-checked.txt";
  for (const fs::path& folder : folders)
    if (auto text = kept(folder / file, states_of(files).text)) return {*text, false};
  const auto folder = std::find_if(folders.begin(), folders.end(), make_writable);
  if (folder == folders.end()) return {compute(), true};
  const fs::path lock_path = *folder / (name + "-checked.lock");
  std::optional<FileLock> lock;
  try {
    lock.emplace(lock_path);
  } catch (const Error&) {
    return {compute(), true};  // a file system without locks: each process for itself
  }
  if (auto text = kept(*folder / file, states_of(files).text)) return {*text, false};
  const FileStates before = states_of(files);
  NodeResult result{compute(), true};
  wait_for_next_tick(before.last_change);
  if (!before.text.empty() && states_of(files).text == before.text) {
    try {
      const std::string text = before.text + result.text + "\n";
      write_file_atomically(*folder / file, text + checksum_line(text));
    } catch (const Error&) {  // a full disk: the next process computes it again
    }
  }
  std::error_code ignored;
  fs::remove(lock_path, ignored);  // processes that wait for it find the result
  return result;
}

}  // namespace megatron
