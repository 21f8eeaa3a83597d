#include "megatron/inference/grammar/compile_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"

namespace megatron {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { reset(); }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

[[noreturn]] void throw_failed(const char* what, int error) {
  throw RetryError(cat("cannot ", what, ": ", std::strerror(error)));
}

// A file in memory that holds the bytes, to be read from its beginning.
Descriptor memory_file(const std::string& bytes) {
  Descriptor file(memfd_create("input", MFD_CLOEXEC));
  if (file.get() < 0) throw_failed("make a file in memory", errno);
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t written = write(file.get(), bytes.data() + at, bytes.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw_failed("write to a file in memory", errno);
    at += static_cast<size_t>(written);
  }
  lseek(file.get(), 0, SEEK_SET);
  return file;
}

// What the process does before it becomes the program: its standard files, no others, and no
// signals that this process blocks.
class Setup {
 public:
  Setup(int in, int out) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawn_file_actions_adddup2(&actions_, in, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions_, out, STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions_, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addclosefrom_np(&actions_, STDERR_FILENO + 1);
    posix_spawnattr_init(&attributes_);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~Setup() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  Setup(const Setup&) = delete;
  Setup& operator=(const Setup&) = delete;

  pid_t start(const std::filesystem::path& program) const {
    std::string path = program.string();
    char* arguments[] = {path.data(), nullptr};
    char* environment[] = {nullptr};
    pid_t pid = 0;
    const int error =
        posix_spawn(&pid, path.c_str(), &actions_, &attributes_, arguments, environment);
    if (error != 0) throw_failed(("run " + path).c_str(), error);
    return pid;
  }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

int wait_for(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

}  // namespace

ProcessResult run_bounded_process(const std::filesystem::path& program, const std::string& input,
                                  int64_t deadline_ms, int64_t most_output_bytes) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(deadline_ms);
  const Descriptor in = memory_file(input);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_failed("make a pipe", errno);
  const Descriptor read_end(ends[0]);
  Descriptor write_end(ends[1]);
  const pid_t pid = Setup(in.get(), write_end.get()).start(program);
  write_end.reset();

  ProcessResult result;
  std::string buffer(1 << 16, '\0');
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd wanted{read_end.get(), POLLIN, 0};
    const int ready = poll(&wanted, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 60000)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0 && left <= 0) result.end = ProcessResult::End::kDeadline;
    const ssize_t count = ready > 0 ? read(read_end.get(), buffer.data(), buffer.size()) : -1;
    if (ready > 0 && count == 0) break;  // it has ended, or closed its output
    if (count > 0) result.output.append(buffer, 0, static_cast<size_t>(count));
    if (std::ssize(result.output) > most_output_bytes) result.end = ProcessResult::End::kTooMuch;
    if (result.end != ProcessResult::End::kExited) break;
  }
  if (result.end != ProcessResult::End::kExited) kill(pid, SIGKILL);
  const int status = wait_for(pid);
  if (result.end != ProcessResult::End::kExited) return result;
  if (WIFSIGNALED(status)) result.end = ProcessResult::End::kKilled;
  result.status = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

}  // namespace megatron
