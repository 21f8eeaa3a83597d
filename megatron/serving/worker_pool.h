// Threads that read requests, with a queue that has an end.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace megatron {

class WorkerPool {
 public:
  WorkerPool(int threads, size_t max_waiting);
  ~WorkerPool();  // stop()

  // False: as many works wait as may, or the pool has stopped.
  bool add(std::function<void()> work);
  size_t num_waiting() const;
  // Ends the threads after the work that they are at; drops what waits.
  void stop();

 private:
  void run();

  const size_t max_waiting_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace megatron
