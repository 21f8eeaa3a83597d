#include "megatron/dist_checkpointing/async_saver.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/log.h"

namespace megatron {

struct AsyncSaver::Impl {
  struct Job {
    SaveRequest request;
    std::shared_ptr<void> keep_alive;
  };

  explicit Impl(int max_in_flight) : limit(std::max(1, max_in_flight)), thread([this] { run(); }) {}

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      Job job = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      SaveOutcome outcome = save(job);
      job = {};  // releases the memory before the saver counts as free
      lock.lock();
      done.push_back(std::move(outcome));
      --in_flight;
      changed.notify_all();
    }
  }

  static SaveOutcome save(const Job& job) {
    SaveOutcome outcome;
    outcome.iteration = job.request.iteration;
    try {
      outcome.result = save_checkpoint(job.request);
    } catch (const std::exception& error) {
      outcome.failure = std::current_exception();
      outcome.error = cat("saving iteration ", job.request.iteration, " failed: ", error.what());
    } catch (...) {
      outcome.error = cat("saving iteration ", job.request.iteration, " failed");
    }
    return outcome;
  }

  const int limit;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> queue;
  std::vector<SaveOutcome> done;
  int in_flight = 0;
  bool stop = false;
  std::thread thread;  // last: it uses all of the above
};

AsyncSaver::AsyncSaver(int max_in_flight) : impl_(std::make_unique<Impl>(max_in_flight)) {}

AsyncSaver::~AsyncSaver() {
  {
    const std::lock_guard<std::mutex> guard(impl_->mutex);
    impl_->stop = true;
    impl_->changed.notify_all();
  }
  impl_->thread.join();
  for (const SaveOutcome& outcome : impl_->done) {
    if (!outcome.error.empty()) log_error(outcome.error);
    for (const std::string& warning : outcome.result.warnings) log_warning(warning);
  }
}

void AsyncSaver::submit(SaveRequest request, std::shared_ptr<void> keep_alive) {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->changed.wait(lock, [&] { return impl_->in_flight < impl_->limit; });
  ++impl_->in_flight;
  impl_->queue.push_back({std::move(request), std::move(keep_alive)});
  impl_->changed.notify_all();
}

std::vector<SaveOutcome> AsyncSaver::poll() {
  const std::lock_guard<std::mutex> guard(impl_->mutex);
  return std::exchange(impl_->done, {});
}

std::vector<SaveOutcome> AsyncSaver::finish() {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->changed.wait(lock, [&] { return impl_->in_flight == 0; });
  return std::exchange(impl_->done, {});
}

int AsyncSaver::in_flight() const {
  const std::lock_guard<std::mutex> guard(impl_->mutex);
  return impl_->in_flight;
}

}  // namespace megatron
