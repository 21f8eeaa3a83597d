// Exchange of rows between all ranks of a group straight to their places in the receivers' memory:
// between GPUs of one host by copy engines, concurrently with compute.
//
// Goal: rows whose number and places differ from exchange to exchange, such as tokens on the way to
// their experts, arrive in the order in which they are used. Non-goals: several hosts, parts of one
// size (comm/peer_mailbox.h).
//
// Slots and signals are those of Note [Mailboxes] in comm/peer_mailbox.h: exchange n uses slot n
// mod kSlots of every rank, a sender signals `arrived` after its rows, and a receiver signals
// `free` when it closes the exchange, for which copies of exchange n + kSlots wait. Every rank
// signals every other one, with or without rows for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "megatron/comm/peer_memory.h"
#include "megatron/comm/process_group.h"

namespace megatron {

class PeerRows {
 public:
  static constexpr int kSlots = 2;
  // Memory of one rank for exchanges in which no rank receives more than `slot_bytes`.
  static int64_t memory_bytes(int64_t group_size, int64_t slot_bytes);

  explicit PeerRows(const ProcessGroup& group) : group_(group) {}

  // Makes room for such exchanges, with equal arguments on all ranks and no exchange open.
  // Collective, and waits for the device, if there is less. Throws Error that says why the ranks
  // cannot reach each other's memory.
  void reserve(at::Device device, int64_t slot_bytes);
  // What this rank has sent to others, in all exchanges.
  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  friend class PeerRowExchange;

  const ProcessGroup group_;
  std::shared_ptr<PeerMemory> peers_;
  at::Tensor memory_;  // bytes: signals, then the slots
  int64_t slot_bytes_ = 0, bytes_sent_ = 0;
  int64_t opened_ = 0, closed_ = 0;  // exchanges; those before `closed_` are closed
  std::vector<int64_t> closed_early_;
};

// One exchange. All ranks open their exchanges in the same order, and at most kSlots at a time.
// Works on the current stream. Not thread safe.
class PeerRowExchange {
 public:
  // Bytes for a rank, this one included: where they lie in its slot, and in the rows here.
  struct Piece {
    int to = 0;
    int64_t byte = 0, from = 0, bytes = 0;
  };
  struct Source {
    at::Tensor rows;  // contiguous; must not change before close()
    std::vector<Piece> pieces;
  };

  // Starts to send the pieces.
  PeerRowExchange(PeerRows& rows, const std::vector<Source>& sources);
  ~PeerRowExchange();  // closes
  PeerRowExchange(const PeerRowExchange&) = delete;
  PeerRowExchange& operator=(const PeerRowExchange&) = delete;

  // What lies in this rank's slot from `byte` on, a view until close(). Waits for the rows of all
  // ranks.
  at::Tensor received(int64_t byte, at::IntArrayRef shape, at::ScalarType type);
  // Frees the slot: work submitted to the current stream from now on must not use it.
  void close();

 private:
  int64_t word(bool free, int sender) const;
  void await_arrival();

  PeerRows& rows_;
  const int64_t number_;
  const int slot_;
  bool open_ = true, arrived_ = false;
  std::shared_ptr<Work> sent_;
};

}  // namespace megatron
