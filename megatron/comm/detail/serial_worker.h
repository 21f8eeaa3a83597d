// One thread that runs tasks in the order in which they were posted: collectives that block their
// thread become asynchronous without losing their order.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "megatron/comm/process_group.h"

namespace megatron {

// A posted task; finished() also when it failed.
class Task final : public Progress {
 public:
  explicit Task(std::function<void()> body) : body_(std::move(body)) {}
  bool finished() const override;
  void wait() const;  // rethrows what the task threw
  void run();
  void give_up();  // instead of running

 private:
  void finish(std::exception_ptr error);

  std::function<void()> body_;  // emptied when it has run, so that what it holds is released
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool finished_ = false;
  std::exception_ptr error_;
};

// Starts its thread with the first task. The destructor joins an idle thread; one that is still in
// a task (a peer did not come) is left behind with what that task holds, so that a failing rank can
// unwind; tasks that have not begun fail.
class SerialWorker {
 public:
  SerialWorker() = default;
  ~SerialWorker();
  SerialWorker(const SerialWorker&) = delete;
  SerialWorker& operator=(const SerialWorker&) = delete;

  std::shared_ptr<Task> post(std::function<void()> body);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace megatron
