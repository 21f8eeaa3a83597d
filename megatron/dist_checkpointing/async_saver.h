// Asynchronous saves: the training step pays only for the copy to host memory.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/save.h"

namespace megatron {

// The outcome of one background save.
struct SaveOutcome {
  int64_t iteration = 0;
  SaveResult result;
  std::string error;           // empty: published
  std::exception_ptr failure;  // what was thrown
};

// One background thread that saves in the order of submission. Call submit, poll and finish from
// one thread (the training loop's). An Agreement given in a request is called from the background
// thread.
class AsyncSaver {
 public:
  // At most max_in_flight saves are queued or running; submit waits beyond that.
  explicit AsyncSaver(int max_in_flight = 1);
  ~AsyncSaver();  // finish(); outcomes that were not polled are logged
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  // `keep_alive` owns the memory that the request's tensors point to; released when the save has
  // ended.
  void submit(SaveRequest request, std::shared_ptr<void> keep_alive);
  // Saves that ended since the last call, in order; never waits.
  std::vector<SaveOutcome> poll();
  // Waits for all saves, then poll().
  std::vector<SaveOutcome> finish();
  int in_flight() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
