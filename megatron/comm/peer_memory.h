// One-sided copies to and from the memory of the other ranks of a group: between GPUs of one host
// by copy engines (CUDA IPC), many parts at a time by one kernel, between threads of one process by
// plain copies.
//
// Goal: transfers that take no SMs from concurrent products, as NCCL's kernels do. Non-goals:
// several hosts; ordering a copy with the peer's own use of its memory. The owner of a shared
// buffer defines when it may be read and written: by signals (comm/peer_mailbox.h) or by other
// means (Note [Peer copies] in distributed/shard_gather.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/process_group.h"

namespace megatron {

// A copy between `local`, contiguous and of the shared buffers' type, and as many elements of a
// rank's buffer from `begin` on.
struct PeerCopy {
  int rank = 0;  // rank of the group; may be this rank itself
  int64_t begin = 0;
  at::Tensor local;
};

// The same of `count` elements of a tensor from `from` on. A tensor of its own for each of
// thousands of parts would cost more than the copies.
struct PeerPart {
  int rank = 0;
  int64_t begin = 0, from = 0, count = 0;
};

// Keeps this rank's buffer alive; between threads also the peers'. Between processes, free it only
// after a barrier that follows the peers' last copies, and before the groups themselves are
// destroyed. Not thread safe.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Runs `body` with a stream of this object as the current one, ordered after all work on the
  // caller's current stream. wait() makes the current stream (not the thread) wait for what `body`
  // submitted.
  virtual std::shared_ptr<Work> run(const std::function<void()>& body) = 0;
  // Inside run(): copies from, or to, the ranks' buffers, in this order.
  virtual void read(std::vector<PeerCopy> copies) = 0;
  virtual void write(std::vector<PeerCopy> copies) = 0;
  virtual void write_parts(const at::Tensor& local, const std::vector<PeerPart>& parts) = 0;
  // Signals are numbers in 4-byte words of the shared buffers: zero at first, increasing, each
  // written by one rank of the group. Writes `value` into word `word` of rank `to`'s buffer once
  // all work on the current stream has completed and is visible.
  virtual void signal(int to, int64_t word, uint32_t value) = 0;
  // Makes the current stream wait until this rank's word, which rank `from` writes, has reached
  // `value`.
  virtual void await(int from, int64_t word, uint32_t value) = 0;
  // Of the ranks' buffers, as kernels of this rank reach them; empty between threads on CPUs.
  virtual std::vector<void*> addresses() const = 0;
};

struct SharedMemory {
  std::shared_ptr<PeerMemory> peers;  // null: not possible here
  std::string obstacle;               // the reason, for a log line; the same on every rank
};

// Gives the ranks of `group` access to each other's `buffer` (contiguous, allocated by libtorch;
// sizes may differ). Collective: all ranks get access or none does, namely if they are processes on
// CPUs, on several hosts, or on GPUs without peer access.
SharedMemory share_memory(const at::Tensor& buffer, const ProcessGroup& group);

}  // namespace megatron
