#include "megatron/comm/control.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "megatron/base/failure_class.h"

namespace megatron {

ControlChannel::ControlChannel(Store& store, const std::string& name, int rank, int size, double timeout_seconds)
    : store_(store.connection("control/" + name)), name_(name), rank_(rank), size_(size), timeout_seconds_(timeout_seconds) {}

// Waits for a key. Asks again and again instead of leaving the waiting to the store, whose errors name no rank.
std::string ControlChannel::take(const std::string& key, int from, const char* what) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_seconds_);
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    if (std::optional<std::string> value = store_->find(key)) return *value;
    if (Clock::now() >= deadline)
      throw RetryError(cat(what, " ", calls_, " of the channel ", name_, " timed out after ", timeout_seconds_, " s: rank ", from,
                           " did not come"));
    std::this_thread::sleep_for(pause);
  }
}

std::vector<std::string> ControlChannel::gather(const std::string& text) {
  ++calls_;
  const auto key = [&](int rank) { return cat("gather/", calls_, "/", rank); };
  if (rank_ != 0) {
    store_->set(key(rank_), text);
    return {};
  }
  std::vector<std::string> texts = {text};
  for (int rank = 1; rank < size_; ++rank) {
    texts.push_back(take(key(rank), rank, "gather"));
    store_->erase(key(rank));
  }
  return texts;
}

std::string ControlChannel::broadcast(const std::string& text) {
  ++calls_;
  const std::string key = cat("broadcast/", calls_);
  if (size_ == 1) return text;
  if (rank_ == 0) {
    store_->set(key, text);
    return text;
  }
  const std::string got = take(key, 0, "broadcast");
  // The last reader clears up.
  if (store_->add(key + "/read", 1) == size_ - 1) {
    store_->erase(key);
    store_->erase(key + "/read");
  }
  return got;
}

void ControlChannel::barrier() {
  gather("");
  broadcast("");
}

}  // namespace megatron
