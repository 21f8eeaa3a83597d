// Ends the process if the start of a job takes too long, wherever it hangs: in name resolution, in
// a call to the store, in a library. Where a wait can be explained, its caller reports first
// (comm/meeting.h).
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace megatron {

class StartDeadline {
 public:
  // `who`: for messages, such as "rank 3". Acts one second after the limit, so that callers with a
  // deadline of their own report first.
  StartDeadline(std::string who, double timeout_seconds);
  ~StartDeadline();  // the start is over
  StartDeadline(const StartDeadline&) = delete;
  StartDeadline& operator=(const StartDeadline&) = delete;

  // Names the current stage for the message: "connecting to the store at node0:29500".
  void enter(std::string stage);

 private:
  void watch();

  const std::string who_;
  const double timeout_seconds_;
  std::mutex mutex_;
  std::condition_variable over_changed_;
  bool over_ = false;
  std::string stage_;
  std::thread thread_;  // last member: it uses the others
};

}  // namespace megatron
