#include "megatron/runtime/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/process.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

struct Owner {
  std::string host;
  int64_t pid = 0;
  uint64_t start = 0;  // start time of the process, in ticks since boot
  int64_t since = 0;   // seconds since 1970
  std::string run_id;
  int restart_count = 0;

  bool operator==(const Owner&) const = default;
};

std::string to_json(const Owner& owner) {
  JsonWriter json;
  json.begin_object()
      .member("host", owner.host)
      .member("pid", owner.pid)
      .member("start", owner.start);
  json.member("since", owner.since)
      .member("run_id", owner.run_id)
      .member("restart_count", owner.restart_count);
  return json.end_object().text() + "\n";
}

// Nothing for an empty or incompletely written file.
std::optional<Owner> owner_from_json(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  try {
    return Owner{json.at("host"),  json.at("pid"),    json.at("start"),
                 json.at("since"), json.at("run_id"), json.at("restart_count")};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::string describe(const Owner& owner) {
  return cat("process ", owner.pid, " on ", owner.host, " since ",
             format_time(owner.since, "%Y-%m-%d %H:%M:%S UTC", /*utc=*/true));
}

// Contents of a small file; empty if it cannot be read.
std::string read_small(int fd) {
  char text[4096];
  const ssize_t got = ::pread(fd, text, sizeof text, 0);
  return std::string(text, static_cast<size_t>(std::max<ssize_t>(got, 0)));
}

double seconds_of(const struct timespec& time) {
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

[[noreturn]] void fail(const char* what, const fs::path& path, int error) {
  throw_system_error(
      cat("cannot ", what, " ", path.string(), ": ", std::generic_category().message(error)),
      error);
}

}  // namespace

struct FolderLock::Impl {
  fs::path folder, path;
  FolderLockOptions options;
  Owner self;
  std::string previous;
  int fd = -1;
  std::atomic<bool> lost{false};
  std::mutex mutex;
  std::condition_variable changed;
  bool released = false;
  std::thread thread;

  // Opens the file at the path and locks it, if the file system supports it. Returns whether this
  // process may read and replace its contents.
  bool open_and_lock() {
    for (;;) {
      fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0666);
      if (fd < 0) fail("create", path, errno);
      struct stat here, there;
      if (::fstat(fd, &here) != 0) fail("read", path, errno);
      MEGATRON_CHECK(S_ISREG(here.st_mode), path.string(), " is not a regular file");
      if (::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
      // Its owner may have removed it between the two calls.
      if (::stat(path.c_str(), &there) == 0 && there.st_ino == here.st_ino &&
          there.st_dev == here.st_dev)
        return true;
      ::close(std::exchange(fd, -1));
    }
  }

  // Seconds since the owner touched the file, by the file server's clock.
  double seconds_untouched() const {
    struct stat lock, now;
    if (::fstat(fd, &lock) != 0) return 0;
    const fs::path probe = cat(path.string(), ".", self.host, "-", self.pid);
    const int probe_fd = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (probe_fd < 0) fail("create", probe, errno);
    const bool known = ::futimens(probe_fd, nullptr) == 0 && ::fstat(probe_fd, &now) == 0;
    ::close(probe_fd);
    ::unlink(probe.c_str());
    return known ? seconds_of(now.st_mtim) - seconds_of(lock.st_mtim) : 0;
  }

  [[noreturn]] void refuse(const std::optional<Owner>& owner, const std::string& sign_of_life) {
    const bool remote = owner && owner->host != self.host;
    const std::string message = cat(
        folder.string(),
        " is in use by another run: ", owner ? describe(*owner) : "an unknown process",
        sign_of_life, "\nhint: ",
        remote ? cat("give another folder, or end that run; if its machine is gone, the folder is "
                     "free ",
                     static_cast<int64_t>(options.stale_seconds), " s after its last sign of life")
               : std::string("give another folder, or end that run"));
    if (remote) throw RetryError(message);
    throw Error(message);
  }

  bool is_earlier_attempt(const Owner& owner) const {
    return !self.run_id.empty() && owner.run_id == self.run_id &&
           owner.restart_count < self.restart_count;
  }

  void acquire() {
    const bool locked = open_and_lock();
    const std::optional<Owner> owner = owner_from_json(read_small(fd));
    if (!locked) refuse(owner, "");
    if (owner && !is_earlier_attempt(*owner)) {
      if (owner->host == self.host) {
        if (process_is_alive(owner->pid, owner->start)) refuse(owner, "");
      } else if (const double silent = seconds_untouched(); silent < options.stale_seconds) {
        refuse(owner,
               cat(", last sign of life ", static_cast<int64_t>(std::max(0.0, silent)), " s ago"));
      }
    }
    if (owner) previous = describe(*owner);
    const std::string text = to_json(self);
    if (::ftruncate(fd, 0) != 0) fail("write", path, errno);
    if (::pwrite(fd, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
      fail("write", path, errno);
    if (::fsync(fd) != 0) fail("write", path, errno);
  }

  bool is_ours() const {
    const int now = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (now < 0) return errno != ENOENT;  // an unreadable file does not count as missing
    const std::string text = read_small(now);
    ::close(now);
    const std::optional<Owner> owner = owner_from_json(text);
    return !owner || *owner == self;
  }

  void touch() {
    std::unique_lock guard(mutex);
    while (!changed.wait_for(guard, std::chrono::duration<double>(options.touch_seconds),
                             [&] { return released; })) {
      if (!is_ours()) lost = true;
      if (!lost) ::futimens(fd, nullptr);
    }
  }
};

FolderLock::FolderLock(const fs::path& folder, FolderLockOptions options)
    : impl_(std::make_unique<Impl>()) {
  Impl& lock = *impl_;
  lock.folder = folder;
  lock.path = folder / kLockName;
  lock.options = std::move(options);
  lock.self = {lock.options.host.empty() ? host_name() : lock.options.host,
               ::getpid(),
               process_start(::getpid()),
               std::time(nullptr),
               lock.options.run_id,
               lock.options.restart_count};
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail("create folder", folder, error.value());
  try {
    lock.acquire();
  } catch (...) {
    if (lock.fd >= 0) ::close(lock.fd);
    throw;
  }
  lock.thread = std::thread([&lock] { lock.touch(); });
}

FolderLock::~FolderLock() {
  release();
  if (impl_->thread.joinable()) impl_->thread.join();
  ::close(impl_->fd);
}

const std::string& FolderLock::previous_owner() const { return impl_->previous; }

void FolderLock::check() const {
  MEGATRON_CHECK(!impl_->lost && impl_->is_ours(), impl_->folder.string(),
                 " was taken over by another run while this one was stopped or could not reach it"
                 "\nhint: the other run is named in ",
                 impl_->path.string());
}

void FolderLock::release() {
  const std::lock_guard guard(impl_->mutex);
  if (std::exchange(impl_->released, true)) return;
  if (!impl_->lost && impl_->is_ours()) ::unlink(impl_->path.c_str());
  impl_->changed.notify_all();
}

}  // namespace megatron
