// Exchange of texts between ranks over the store, for coordination that needs no device and
// must not disturb training, such as publishing a checkpoint from a background thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/store.h"

namespace megatron {

// One rank's end of a channel. All ranks make the same calls in the same order. A call waits as
// long as the rank that it waits for reports progress, and for `timeout_seconds` after that; then
// it throws a CollectiveError that blames that rank. Use from one thread only, except progress().
// Channels are independent of each other.
class ControlChannel {
 public:
  // Takes no connection of its own: nothing waits in the store. Channels of one store have
  // different names.
  ControlChannel(Store& store, const std::string& name, int rank, int size, double timeout_seconds);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Rank 0 gets the texts of all ranks in order; the others get an empty list and do not wait.
  std::vector<std::string> gather(const std::string& text);
  // Every rank gets rank 0's text; rank 0 does not wait.
  std::string broadcast(const std::string& text);
  // Reports that this rank is working on what the next call needs: ranks that wait for it keep
  // waiting. Written to the store at most once a second (ten times per timeout if that is more
  // often). Any thread.
  void progress();

 private:
  void put(const std::string& key, const std::string& text);
  // The text whose first piece is the value of the key.
  std::string join(const std::string& key, const std::string& first);
  void erase(const std::string& key, const std::string& text);
  std::string take(const std::string& key, int from, const char* what, double patience);

  std::shared_ptr<Store> store_;
  std::string name_;
  int rank_;
  int size_;
  double timeout_seconds_;
  const double interval_;  // seconds between two signs of progress in the store
  // Between two questions: thousands of ranks that wait ask some thousand times a second together
  const std::chrono::milliseconds longest_pause_;
  int64_t calls_ = 0;
  std::atomic<int64_t> work_{0};
  std::atomic<double> told_{0};  // time of the last report of progress
};

}  // namespace megatron
