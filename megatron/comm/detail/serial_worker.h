// A thread that runs tasks in the order in which they were posted: makes blocking collectives
// asynchronous while keeping their order.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "megatron/comm/process_group.h"

namespace megatron {

// A posted task; finished() is also true if it failed.
class Task final : public Progress {
 public:
  explicit Task(std::function<void()> body) : body_(std::move(body)) {}
  bool finished() const override;
  void wait() const;  // rethrows what the task threw
  void run();
  void give_up();  // fail it instead of running it

 private:
  void finish(std::exception_ptr error);

  std::function<void()> body_;  // cleared after running, to release captured tensors
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool finished_ = false;
  std::exception_ptr error_;
};

// The thread starts with the first task. The destructor joins an idle thread. A thread blocked in a
// task (a peer did not arrive) is detached, together with what the task holds, so that a failing
// rank can unwind; tasks that have not started fail.
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
