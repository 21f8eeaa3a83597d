// Messages between rank 0, which decides, and the other ranks of a model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace megatron {

// From another rank; `lost`: its connection has ended, and no more will come.
struct RankMessage {
  int rank = 0;
  std::string bytes;
  bool lost = false;
};

// Rank 0's end. Messages of one rank come in the order in which they were sent. Used by one thread.
class FollowerLinks {
 public:
  virtual ~FollowerLinks() = default;
  virtual int num_ranks() const = 0;  // rank 0 included
  // Never waits for the other rank; to one whose connection has ended it does nothing.
  virtual void send(int rank, std::string_view bytes) = 0;
  // The next message of any rank; null: none came within `wait_ns`.
  virtual std::optional<RankMessage> receive(int64_t wait_ns) = 0;
};

// Another rank's end. Throws Error when the connection to rank 0 has ended.
class LeaderLink {
 public:
  virtual ~LeaderLink() = default;
  virtual int rank() const = 0;
  virtual void send(std::string_view bytes) = 0;
  virtual std::optional<std::string> receive(int64_t wait_ns) = 0;
};

}  // namespace megatron
