#include "megatron/comm/detail/serial_worker.h"

#include <deque>
#include <thread>
#include <utility>

namespace megatron {

bool Task::finished() const {
  std::lock_guard lock(mutex_);
  return finished_;
}

void Task::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return finished_; });
  if (error_) std::rethrow_exception(error_);
}

void Task::run() {
  std::exception_ptr error;
  try {
    body_();
  } catch (...) {
    error = std::current_exception();
  }
  finish(error);
}

void Task::give_up() {
  finish(std::make_exception_ptr(
      Error("a call was cancelled because its group was destroyed before it ran")));
}

void Task::finish(std::exception_ptr error) {
  body_ = nullptr;
  std::lock_guard lock(mutex_);
  error_ = error;
  finished_ = true;
  changed_.notify_all();
}

struct SerialWorker::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Task>> tasks;
  std::shared_ptr<Task> current;
  bool stopping = false;
  std::thread thread;

  void loop() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !tasks.empty(); });
      if (stopping) return;
      current = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      current->run();
      lock.lock();
    }
  }
};

SerialWorker::~SerialWorker() {
  if (!state_) return;
  bool idle;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    idle = state_->tasks.empty() && (!state_->current || state_->current->finished());
    for (const std::shared_ptr<Task>& task : state_->tasks) task->give_up();
    state_->tasks.clear();
    state_->changed.notify_all();
  }
  if (idle)
    state_->thread.join();
  else
    state_->thread.detach();
}

std::shared_ptr<Task> SerialWorker::post(std::function<void()> body) {
  auto task = std::make_shared<Task>(std::move(body));
  if (!state_) {
    state_ = std::make_shared<State>();
    state_->thread = std::thread([state = state_] { state->loop(); });
  }
  std::lock_guard lock(state_->mutex);
  state_->tasks.push_back(task);
  state_->changed.notify_all();
  return task;
}

}  // namespace megatron
