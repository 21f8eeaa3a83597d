// Ends the process when the start of a job is not over in time, wherever it hangs: in the
// resolution of a name, in a call to the store, in a library. What can be explained better is
// explained before, by who waits (comm/meeting.h).
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace megatron {

class StartDeadline {
 public:
  // `who`: of messages, such as "rank 3". Acts one second after the limit, so that those who wait
  // for it come first.
  StartDeadline(std::string who, double timeout_seconds);
  ~StartDeadline();  // the start is over
  StartDeadline(const StartDeadline&) = delete;
  StartDeadline& operator=(const StartDeadline&) = delete;

  // What the rank does from now on: "connecting to the store at node0:29500".
  void enter(std::string stage);

 private:
  void watch();

  const std::string who_;
  const double timeout_seconds_;
  std::mutex mutex_;
  std::condition_variable over_changed_;
  bool over_ = false;
  std::string stage_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace megatron
