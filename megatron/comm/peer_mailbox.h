// Exchange of tensors between all ranks of a group by copies into the receiver's memory: between
// GPUs of one host by copy engines, concurrently with compute and without a barrier.
//
// Goal: overlap the exchanges of tensor parallelism with the products that consume and produce
// them. Non-goals: several hosts, parts larger than the mailbox was opened for, a rank that skips
// an exchange; use collectives for these (fits() tells).
//
// Note [Mailboxes]
//
// A rank's memory has kSlots slots, each with room for one part from every rank. The n-th exchange,
// in the order in which all ranks open them, uses slot n mod kSlots. Two signals order the
// accesses:
//   arrived   a sender writes its part, then its signal n + 1; the receiver's stream waits for that
//             before it reads
//   free      close() writes n + 1 to every sender, after all uses of the slot on the receiver's
//             stream; a sender's copies of exchange n + kSlots wait for that
// A copy thus waits for the receiver's close() of the previous exchange in that slot. There is no
// deadlock: every rank closes exchange n before it opens n + kSlots (asserted), and its close()
// waits only for arrivals of exchanges up to n and for its own copies of them. Streams wait,
// threads never do. If a rank fails, its peers' streams block on its signal and later collectives
// queue behind; the failure monitor ends the job at the timeout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/peer_memory.h"
#include "megatron/comm/process_group.h"

namespace megatron {

class PeerMailbox {
 public:
  static constexpr int kSlots = 3;
  // Memory of one rank for parts of `part_bytes`.
  static int64_t memory_bytes(int64_t group_size, int64_t part_bytes);

  explicit PeerMailbox(const ProcessGroup& group) : group_(group) {}

  // Allocates memory for parts of up to `part_bytes`, the same on all ranks. Collective. Does
  // nothing if peers cannot be reached or the mailbox is already open for parts this large.
  void open(at::Device device, int64_t part_bytes);
  // Whether the mailbox is open and parts of this size fit into it.
  bool fits(const at::Tensor& part) const;
  const std::string& obstacle() const { return obstacle_; }  // why open() failed
  int64_t exchanges() const { return opened_; }              // number so far

  // Queues work for the current stream that is off the critical path, of `flops` floating-point
  // operations. It runs when an exchange first waits for a part, to overlap with the transfer, when
  // one opens kSlots exchanges after one that it holds, or in run_postponed(), which the caller
  // must arrange. It may hold one exchange open.
  void postpone(double flops, std::function<void()> work);
  double postponed_flops() const { return postponed_flops_; }
  void run_postponed();

 private:
  friend class PeerExchange;

  // Takes the next number.
  int64_t open_exchange();

  const ProcessGroup group_;
  std::shared_ptr<PeerMemory> peers_;
  at::Tensor memory_;  // 4-byte words: signals, then slots of `group` parts
  int64_t part_words_ = 0;
  int64_t opened_ = 0;  // exchanges opened
  int64_t closed_ = 0;  // every exchange before this one is closed
  std::vector<int64_t> closed_early_;
  std::vector<std::function<void()>> postponed_;
  double postponed_flops_ = 0.0;
  std::string obstacle_;
};

// One exchange of parts shaped like `part` between all ranks. All ranks open their exchanges in the
// same order and post to every other rank once. Works on the current stream. Not thread safe.
class PeerExchange {
 public:
  PeerExchange(PeerMailbox& mailbox, const at::Tensor& part);
  ~PeerExchange();  // closes
  PeerExchange(const PeerExchange&) = delete;
  PeerExchange& operator=(const PeerExchange&) = delete;

  // Sends `part`, contiguous, which must not change before close(). To this rank itself: copies it
  // into the slot.
  void post(int to, const at::Tensor& part);
  // Waits for the part from a rank; it lies in memory of the mailbox until close().
  at::Tensor part(int from);
  // The parts of `count` ranks, in rank order: [count * n, ...] for parts [n, ...].
  at::Tensor parts(int first, int count);
  // Frees the slot: work submitted to the current stream from now on must not use it.
  void close();

 private:
  int64_t word(bool free, int sender) const;
  at::Tensor place(int from, int count) const;  // memory of `count` ranks' parts

  PeerMailbox& mailbox_;
  const std::vector<int64_t> shape_;
  const at::ScalarType type_;
  const int64_t words_;
  const int64_t number_;
  const int slot_;
  bool open_ = true;
  std::shared_ptr<Work> own_;  // the copy to this rank itself
  std::vector<std::shared_ptr<Work>> posts_;
  std::vector<char> arrived_;  // by rank: the stream has waited for its part
};

}  // namespace megatron
