#include "megatron/dist_checkpointing/detail/ownership.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <sstream>

#include "megatron/base/check.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "unknown";
  std::string host;
  for (const char* c = name; *c != '\0'; ++c)
    host += std::isalnum(static_cast<unsigned char>(*c)) || *c == '.' || *c == '_' ? *c : '_';
  return host.empty() ? "unknown" : host;
}

// Start time of a process in ticks since boot (field 22 of /proc/<pid>/stat), which tells a reused pid; 0: no such process.
uint64_t process_start(int64_t pid) {
  std::ifstream in(cat("/proc/", pid, "/stat"));
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t close = text.rfind(')');  // the command's name may hold anything
  if (close == std::string::npos) return 0;
  std::istringstream fields(text.substr(close + 1));
  std::string word;
  for (int field = 3; field <= 22; ++field)
    if (!(fields >> word)) return 0;
  return std::strtoull(word.c_str(), nullptr, 10);
}

struct Owner {
  std::string host;
  int64_t pid = 0;
  uint64_t start = 0;
};

std::optional<Owner> owner_of(const std::string& name) {
  const size_t at = name.find(kTemporaryInfix);
  if (at == std::string::npos) return std::nullopt;
  std::vector<std::string> parts;
  std::istringstream in(name.substr(at + std::string_view(kTemporaryInfix).size()));
  for (std::string part; std::getline(in, part, '-');) parts.push_back(part);
  if (parts.size() != 4) return std::nullopt;
  for (size_t i = 1; i < 4; ++i)
    if (parts[i].empty() || parts[i].find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  return Owner{parts[0], std::strtoll(parts[1].c_str(), nullptr, 10), std::strtoull(parts[2].c_str(), nullptr, 10)};
}

bool untouched_for_a_day(const fs::path& path) {
  std::error_code error;
  const auto limit = fs::file_time_type::clock::now() - std::chrono::hours(24);
  if (fs::last_write_time(path, error) > limit || error) return false;
  if (!fs::is_directory(path, error)) return true;
  for (fs::recursive_directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (fs::last_write_time(it->path(), ignored) > limit || ignored) return false;
  }
  return !error;
}

bool is_locked(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno != ENOENT;
  const bool locked = ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(fd);
  return locked;
}

bool owner_is_gone(const Owner& owner, const fs::path& path) {
  if (owner.host != host_name()) return untouched_for_a_day(path) && !is_locked(path);
  const bool alive = (::kill(static_cast<pid_t>(owner.pid), 0) == 0 || errno == EPERM) &&
                     process_start(owner.pid) == owner.start;
  return !alive && !is_locked(path);
}

}  // namespace

fs::path temporary_path(const fs::path& path) {
  static std::atomic<uint64_t> counter{0};
  const int64_t pid = ::getpid();
  return fs::path(cat(path.string(), kTemporaryInfix, host_name(), "-", pid, "-", process_start(pid), "-", counter++));
}

DirectoryLock::DirectoryLock(const fs::path& directory) {
  fd_ = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd_ >= 0) (void)::flock(fd_, LOCK_EX | LOCK_NB);
}

DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) ::close(fd_);
}

std::vector<fs::path> dead_leftovers(const fs::path& root) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.rfind("iter_", 0) != 0 && name.rfind("latest_checkpointed_iteration.txt", 0) != 0) continue;
    const std::optional<Owner> owner = owner_of(name);
    if (owner && owner_is_gone(*owner, it->path())) found.push_back(it->path());
  }
  return found;
}

}  // namespace megatron
