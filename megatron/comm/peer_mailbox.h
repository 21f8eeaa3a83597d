// Parts of tensors from each rank of a group to each other one, by copies into the receiver's
// memory: between GPUs of one host by copy engines, beside computation and without a meeting of all
// ranks.
//
// Goal: the exchanges of tensor parallelism under the products that make and use them. Non-goals:
// several hosts, parts larger than foreseen, a rank that leaves an exchange out; collectives do
// these (fits() says which).
//
// Note [Mailboxes]
//
// A rank's memory has kSlots slots, each with a place for a part from every rank. The n-th
// exchange, in the order in which all ranks open them, uses slot n mod kSlots. Two signals order
// what happens there:
//   arrived   a sender writes its part, then its signal n + 1; the receiver's stream waits for that
//             before it reads
//   free      close() writes, behind what the receiver's stream did with the slot, n + 1 to every
//             sender; a sender's copies of
//             exchange n + kSlots wait for that
// A copy thus waits for the receiver's close() of the last exchange of the slot. No circle: every
// rank closes exchange n before it opens n + kSlots (asserted), and its close() waits only for
// arrivals of exchanges up to n and for its own copies of them. Threads never wait, streams do. A
// rank that fails lets its peers' streams wait, and with them the collectives behind, under the
// eyes of the failure monitor.
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
  // Of one rank, for parts of `part_bytes`.
  static int64_t memory_bytes(int64_t group_size, int64_t part_bytes);

  explicit PeerMailbox(const ProcessGroup& group) : group_(group) {}

  // For parts of up to `part_bytes`, the same on all ranks. Collective. Does nothing where peers
  // cannot be reached, or when it is open for parts as large.
  void open(at::Device device, int64_t part_bytes);
  // Whether parts like this one go through it; no part does before open().
  bool fits(const at::Tensor& part) const;
  const std::string& obstacle() const { return obstacle_; }  // why open() could not
  int64_t exchanges() const { return opened_; }              // so far

  // Work for the current stream that nothing here waits for, `flops` of products: it runs where an
  // exchange first waits for a part, and hides its way, or in run_postponed(), which whoever
  // postpones sees to. It may hold one exchange open.
  void postpone(double flops, std::function<void()> work);
  double postponed_flops() const { return postponed_flops_; }
  void run_postponed();

 private:
  friend class PeerExchange;

  const ProcessGroup group_;
  std::shared_ptr<PeerMemory> peers_;
  at::Tensor memory_;  // 4-byte words: signals, then slots of `group` parts
  int64_t part_words_ = 0;
  int64_t opened_ = 0;  // exchanges
  int64_t closed_ = 0;  // all those before
  std::vector<int64_t> closed_early_;
  std::vector<std::function<void()>> postponed_;
  double postponed_flops_ = 0.0;
  std::string obstacle_;
};

// One exchange: parts like `part`, from and to every rank; all ranks open theirs in the same order,
// and post to each other rank once. Works on the current stream. Not thread safe.
class PeerExchange {
 public:
  PeerExchange(PeerMailbox& mailbox, const at::Tensor& part);
  ~PeerExchange();  // closes
  PeerExchange(const PeerExchange&) = delete;
  PeerExchange& operator=(const PeerExchange&) = delete;

  // Sends `part`, contiguous, which must not change before close(); to this rank itself: copies it
  // into the slot.
  void post(int to, const at::Tensor& part);
  // The part from a rank, in memory of the mailbox until close().
  at::Tensor part(int from);
  // Those of `count` ranks, in rank order: [count * n, ...] for parts [n, ...].
  at::Tensor parts(int first, int count);
  // Nothing of the slot is used any more by what the current stream is given from now on.
  void close();

 private:
  int64_t word(bool free, int sender) const;
  at::Tensor place(int from, int count) const;  // of `count` ranks

  PeerMailbox& mailbox_;
  const std::vector<int64_t> shape_;
  const at::ScalarType type_;
  const int64_t words_;
  const int64_t number_;
  const int slot_;
  bool open_ = true;
  std::shared_ptr<Work> own_;  // the copy within this rank
  std::vector<std::shared_ptr<Work>> posts_;
  std::vector<char> arrived_;  // by rank: the stream has waited for it
};

}  // namespace megatron
