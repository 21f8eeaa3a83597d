#include "megatron/comm/detail/start_deadline.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"

namespace megatron {

StartDeadline::StartDeadline(std::string who, double timeout_seconds)
    : who_(std::move(who)),
      timeout_seconds_(timeout_seconds),
      stage_("starting"),
      thread_([this] { watch(); }) {}

StartDeadline::~StartDeadline() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  over_changed_.notify_all();
  thread_.join();
}

void StartDeadline::enter(std::string stage) {
  const std::lock_guard lock(mutex_);
  stage_ = std::move(stage);
}

void StartDeadline::watch() {
  std::unique_lock lock(mutex_);
  const auto limit = std::chrono::duration<double>(timeout_seconds_ + 1);
  if (over_changed_.wait_for(lock, limit, [this] { return over_; })) return;
  const std::string text =
      cat("error: ", who_, " has not started within ", timeout_seconds_, " s: it was still ",
          stage_, "\nhint: see the output of rank 0; --distributed-timeout-minutes waits longer\n");
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  std::_Exit(kExitRetry);
}

}  // namespace megatron
