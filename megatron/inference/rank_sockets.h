// Messages between the ranks of a model as processes: a TCP connection of each to rank 0.
#pragma once

#include <memory>
#include <string>

#include "megatron/inference/rank_link.h"

namespace megatron {

// Rank 0's end. Listens in the constructor; messages to a rank that has not connected yet wait for
// it. Connections are served by a thread of its own.
class RankSockets final : public FollowerLinks {
 public:
  // `host`: the address to listen on, and that the others connect to. Throws Error if it cannot be
  // listened on.
  RankSockets(const std::string& host, int ranks);
  // Sends what is under way, for a second at most.
  ~RankSockets() override;

  // What the other ranks need to connect: "HOST PORT SECRET". Whoever does not know the secret is
  // turned away.
  const std::string& address() const;

  int num_ranks() const override;
  void send(int rank, std::string_view bytes) override;
  std::optional<RankMessage> receive(int64_t wait_ns) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Another rank's end.
class RankSocket final : public LeaderLink {
 public:
  // `address`: of rank 0's RankSockets. Throws Error if nobody listens there.
  RankSocket(const std::string& address, int rank);
  ~RankSocket() override;

  int rank() const override;
  void send(std::string_view bytes) override;
  std::optional<std::string> receive(int64_t wait_ns) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
