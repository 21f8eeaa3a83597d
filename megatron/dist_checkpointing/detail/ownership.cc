#include "megatron/dist_checkpointing/detail/ownership.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/process.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

struct Owner {
  std::string host;  // empty: not in the name
  int64_t pid = 0;
  uint64_t start = 0;  // 0: not in the name
};

std::optional<Owner> owner_of(const std::string& name) {
  const size_t at = name.find(kTemporaryInfix);
  if (at == std::string::npos) return std::nullopt;
  std::vector<std::string> parts;
  std::istringstream in(name.substr(at + std::string_view(kTemporaryInfix).size()));
  for (std::string part; std::getline(in, part, '-');) parts.push_back(part);
  if (parts.size() != 4) return std::nullopt;
  for (size_t i = 1; i < 4; ++i)
    if (parts[i].empty() || parts[i].find_first_not_of("0123456789") != std::string::npos)
      return std::nullopt;
  return Owner{parts[0], std::strtoll(parts[1].c_str(), nullptr, 10),
               std::strtoull(parts[2].c_str(), nullptr, 10)};
}

bool untouched_for(std::chrono::hours hours, const fs::path& path) {
  std::error_code error;
  const auto limit = fs::file_time_type::clock::now() - hours;
  if (fs::last_write_time(path, error) > limit || error) return false;
  if (!fs::is_directory(path, error)) return true;
  for (fs::recursive_directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (fs::last_write_time(it->path(), ignored) > limit || ignored) return false;
  }
  return !error;
}

bool is_locked(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return errno != ENOENT;
  const bool locked = ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(fd);
  return locked;
}

bool is_running(int64_t pid) { return ::kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM; }

bool owner_is_alive(const Owner& owner, const fs::path& path) {
  if (owner.host != host_name()) return is_locked(path);
  return process_is_alive(owner.pid, owner.start) || is_locked(path);
}

bool owner_is_gone(const Owner& owner, const fs::path& path) {
  return !owner_is_alive(owner, path) &&
         (owner.host == host_name() || untouched_for(std::chrono::hours(24), path));
}

bool is_number(const std::string& text) {
  return !text.empty() && text.size() < 19 &&
         text.find_first_not_of("0123456789") == std::string::npos;
}

// The pid of `<name>.tmp-<pid>-<n>`.
std::optional<int64_t> pid_of_renamed_file(const std::string& name) {
  const size_t at = name.rfind(kTemporaryInfix);
  if (at == std::string::npos || at == 0) return std::nullopt;
  const std::string numbers = name.substr(at + std::string_view(kTemporaryInfix).size());
  const size_t dash = numbers.find('-');
  if (dash == std::string::npos || !is_number(numbers.substr(0, dash)) ||
      !is_number(numbers.substr(dash + 1)))
    return std::nullopt;
  return std::stoll(numbers.substr(0, dash));
}

}  // namespace

fs::path temporary_path(const fs::path& path) {
  static std::atomic<uint64_t> counter{0};
  const int64_t pid = ::getpid();
  return fs::path(cat(path.string(), kTemporaryInfix, host_name(), "-", pid, "-",
                      process_start(pid), "-", counter++));
}

DirectoryLock::DirectoryLock(const fs::path& directory) {
  fd_ = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd_ >= 0) (void)::flock(fd_, LOCK_EX | LOCK_NB);
}

DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) ::close(fd_);
}

std::optional<WriterState> writer_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (const std::optional<Owner> owner = owner_of(name))
    return WriterState{cat("process ", owner->pid, " on ", owner->host),
                       owner_is_alive(*owner, path), owner_is_gone(*owner, path)};
  if (const std::optional<int64_t> pid = pid_of_renamed_file(name)) {
    const bool running = is_running(*pid);
    return WriterState{cat("process ", *pid), running,
                       !running && untouched_for(std::chrono::hours(1), path)};
  }
  return std::nullopt;
}

std::vector<fs::path> dead_leftovers(const fs::path& root) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.rfind("iter_", 0) != 0 && name.rfind("latest_checkpointed_iteration.txt", 0) != 0)
      continue;
    const std::optional<Owner> owner = owner_of(name);
    if (owner && owner_is_gone(*owner, it->path())) found.push_back(it->path());
  }
  return found;
}

}  // namespace megatron
