// The operations of a group of ranks. In a group of size 1 every collective is a no-op, so that one
// rank and N ranks run the same code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/reduce_op.h"

namespace megatron {

// Thrown when a call failed because of a peer: it died, did not arrive, or made another call.
// Usually a consequence of a failure elsewhere, not its cause.
class CollectiveError : public Error {
 public:
  explicit CollectiveError(const std::string& message, int culprit = -1)
      : Error(message), culprit(culprit) {}
  int culprit;  // the global rank to blame; -1: unknown
};

// Whether an operation has finished; may be asked from any thread, holds no tensors and may outlive
// its Work.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual bool finished() const = 0;
};

// An operation in flight. Keeps its inputs alive until wait() has returned.
class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;  // throws Error when the operation failed, timed out or a peer failed
  // Null: the operation finished before the call returned.
  virtual std::shared_ptr<const Progress> progress() const { return nullptr; }
};

// How a group's communicator is used.
// kExclusive: one operation at a time; a kernel may take as many SMs as the library likes.
// kConcurrent: kernels of this group may run concurrently with compute and with other such groups.
// They are limited to a few SMs each, so that all fit at once and cannot deadlock waiting for each
// other's SMs.
enum class CommunicatorUse { kExclusive, kConcurrent };

class PeerCollectives;
class PeerMailbox;
class PeerRows;

// The operations of one group; implemented by c10d (NCCL, Gloo) and by ranks as threads. Every rank
// of the group makes the same calls in the same order. Tensors are contiguous; results appear in
// place after wait().
class Backend {
 public:
  virtual ~Backend() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  // output [size * n], input [n]: the inputs of all ranks, in rank order.
  virtual std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) = 0;
  // output [n], input [size * n]: this rank's part of the sum.
  virtual std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input,
                                               ReduceOp op) = 0;
  virtual std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                           at::Tensor input, std::vector<int64_t> input_sizes) = 0;
  virtual std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) = 0;
  // Messages between two ranks arrive in the order in which they were sent. A receive may be posted
  // long before it is waited for.
  virtual std::shared_ptr<Work> send(at::Tensor tensor, int peer) = 0;
  virtual std::shared_ptr<Work> recv(at::Tensor tensor, int peer) = 0;
  virtual void barrier() = 0;
  // A group of the given ranks of this one, in the order given. Called by its members only, with
  // equal arguments; `name` distinguishes groups of the same ranks.
  virtual std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                            CommunicatorUse use) = 0;

 private:
  friend class ProcessGroup;
  std::weak_ptr<PeerMailbox> mailbox_;
  std::weak_ptr<PeerRows> peer_rows_;
  std::weak_ptr<PeerCollectives> peer_collectives_;
};

// A value type over a shared Backend; default-constructed it is the group of one rank, in which
// every verb is a no-op (all_gather and reduce_scatter copy).
class ProcessGroup {
 public:
  ProcessGroup() = default;
  ProcessGroup(std::shared_ptr<Backend> backend, std::string name);

  int rank() const { return backend_ ? backend_->rank() : 0; }
  int size() const { return backend_ ? backend_->size() : 1; }
  const std::string& name() const { return name_; }  // "tp", "dp", ... for messages

  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::kSum) const;
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) const;
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input,
                                       ReduceOp op = ReduceOp::kSum) const;
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) const;
  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) const;
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) const;
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) const;
  void barrier() const;
  // See Backend::subgroup; `ranks` must contain this rank. A single rank gives the group of one.
  ProcessGroup subgroup(const std::vector<int>& ranks, const std::string& name,
                        CommunicatorUse use = CommunicatorUse::kExclusive) const;
  // The mailbox of this group (comm/peer_mailbox.h): the same for all who hold it at one time, made
  // for the first of them and not opened. Null in a group of one.
  std::shared_ptr<PeerMailbox> mailbox() const;
  // The same for rows that go straight to their places (comm/peer_rows.h).
  std::shared_ptr<PeerRows> peer_rows() const;
  // The same for small collectives by kernels (comm/one_shot/peer_collectives.h). As long as
  // somebody holds them open, all_reduce, all_gather and reduce_scatter use them for the tensors
  // that they take.
  std::shared_ptr<PeerCollectives> peer_collectives() const;
  // Those that somebody holds; else null.
  std::shared_ptr<PeerCollectives> held_peer_collectives() const;

 private:
  std::shared_ptr<Backend> backend_;
  std::string name_ = "self";
};

}  // namespace megatron
