#include "megatron/inference/engine_thread.h"

#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/log.h"

namespace megatron {
namespace {

// How long a step may wait for something to happen; also how soon stop() is noticed.
constexpr int64_t kWaitNs = 20'000'000;

}  // namespace

EngineThread::~EngineThread() { stop(); }

void EngineThread::start() {
  thread_ = std::thread([this] { run(); });
}

void EngineThread::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void EngineThread::fail(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = message;
}

EngineStats EngineThread::stats() const {
  EngineStats stats = engine_.stats();
  const std::lock_guard lock(mutex_);
  if (failure_.empty() || stats.state == EngineState::kFailed) return stats;
  stats.state = EngineState::kFailed;
  stats.failure = failure_;
  return stats;
}

void EngineThread::tell() {
  std::vector<Event> events = engine_.take_events();
  if (!events.empty() && listener_) listener_(std::move(events));
}

void EngineThread::run() {
  while (!stopping_) {
    try {
      engine_.step(kWaitNs);
    } catch (const std::exception& error) {
      // Once: afterwards the engine is kFailed, and says so in its statistics.
      log_error(cat("the engine has failed: ", error.what()));
    }
    tell();
  }
}

}  // namespace megatron
