// Agreement between ranks on small texts, over the store: for what needs no device and must not
// disturb training, such as publishing a checkpoint from a background thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/store.h"

namespace megatron {

// One rank's end of a channel. The ranks make the same calls in the same order; each call waits as
// long as the rank that it waits for makes progress, and for `timeout_seconds` after that; then it
// throws a CollectiveError that blames this rank. Not thread safe but for progress(): one thread
// per channel, and channels do not disturb one another.
class ControlChannel {
 public:
  // Takes a connection of its own. Channels of one store have different names.
  ControlChannel(Store& store, const std::string& name, int rank, int size, double timeout_seconds);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Rank 0 gets the texts of all ranks in order; the others get nothing and do not wait.
  std::vector<std::string> gather(const std::string& text);
  // Every rank gets rank 0's text; rank 0 does not wait.
  std::string broadcast(const std::string& text);
  // Returns when every rank has called it.
  void barrier();
  // This rank is at work on what the next call needs: those who wait for it wait on. Written to the
  // store at most ten times per timeout and once a second. Any thread.
  void progress();

 private:
  std::string take(const std::string& key, int from, const char* what, double patience);

  std::shared_ptr<Store> store_;
  std::string name_;
  int rank_;
  int size_;
  double timeout_seconds_;
  const double interval_;  // seconds between two signs of progress in the store
  int64_t calls_ = 0;
  std::atomic<int64_t> work_{0};
  std::atomic<double> told_{0};  // when the last sign was written
};

}  // namespace megatron
