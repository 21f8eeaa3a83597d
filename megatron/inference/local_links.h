// Messages between the ranks of a model in one process, for proofs and tests.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "megatron/inference/rank_link.h"

namespace megatron {

// Rank 0's end of the connections of ranks that are threads, or that one thread runs in turns.
class LocalLinks final : public FollowerLinks {
 public:
  explicit LocalLinks(int ranks) : to_(static_cast<size_t>(ranks)) {}

  int num_ranks() const override { return static_cast<int>(to_.size()); }
  void send(int rank, std::string_view bytes) override {
    const std::lock_guard lock(mutex_);
    to_[static_cast<size_t>(rank)].emplace_back(bytes);
    changed_.notify_all();
  }
  std::optional<RankMessage> receive(int64_t wait_ns) override {
    std::unique_lock lock(mutex_);
    if (wait_ns > 0)
      changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns), [&] { return !from_.empty(); });
    if (from_.empty()) return std::nullopt;
    RankMessage message = std::move(from_.front());
    from_.pop_front();
    return message;
  }

  void send_from(RankMessage message) {
    const std::lock_guard lock(mutex_);
    from_.push_back(std::move(message));
    changed_.notify_all();
  }
  std::optional<std::string> receive_at(int rank, int64_t wait_ns) {
    std::unique_lock lock(mutex_);
    auto& mail = to_[static_cast<size_t>(rank)];
    if (wait_ns > 0)
      changed_.wait_for(lock, std::chrono::nanoseconds(wait_ns), [&] { return !mail.empty(); });
    if (mail.empty()) return std::nullopt;
    std::string bytes = std::move(mail.front());
    mail.pop_front();
    return bytes;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<std::string>> to_;
  std::deque<RankMessage> from_;
};

// Another rank's end.
class LocalLink final : public LeaderLink {
 public:
  LocalLink(LocalLinks& links, int rank) : links_(links), rank_(rank) {}
  int rank() const override { return rank_; }
  void send(std::string_view bytes) override {
    links_.send_from({rank_, std::string(bytes), false});
  }
  std::optional<std::string> receive(int64_t wait_ns) override {
    return links_.receive_at(rank_, wait_ns);
  }

 private:
  LocalLinks& links_;
  int rank_;
};

}  // namespace megatron
