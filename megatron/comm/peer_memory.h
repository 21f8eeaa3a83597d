// Copies to and from the memory of the other ranks of a group, without their help: between GPUs of
// one host by copy engines (CUDA IPC), between threads of one process by plain copies.
//
// Goal: transfers that take no multiprocessor from the products which run beside them, as NCCL's
// kernels do. Non-goals: several hosts; an order between a copy and what the peer does with its
// memory. Whoever shares a buffer says when it may be read and written: by signals
// (comm/peer_mailbox.h) or by other means (Note [Peer copies] in distributed/shard_gather.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megatron/comm/process_group.h"

namespace megatron {

// `local`, contiguous and of the shared buffers' type, and as many elements of a rank's buffer,
// from `begin` on.
struct PeerCopy {
  int rank = 0;  // of the group; this rank's own buffer as well
  int64_t begin = 0;
  at::Tensor local;
};

// Keeps this rank's buffer; between threads also the peers'. Between processes a rank gives its
// buffer up when no peer copies to or from it any more: a barrier, as before the groups themselves
// are given up. Not thread safe.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  // Runs `body` with a stream of this object's as the current one, which goes on after all work
  // that the caller's current stream has been given. What `body` put there is over after wait(),
  // which makes the current stream wait and not the thread.
  virtual std::shared_ptr<Work> run(const std::function<void()>& body) = 0;
  // Inside run(): copies out of, or into, the ranks' buffers, in this order.
  virtual void read(std::vector<PeerCopy> copies) = 0;
  virtual void write(std::vector<PeerCopy> copies) = 0;
  // Signals are numbers in 4-byte words of the shared buffers: zero at first, growing, each written
  // by one rank of the group. Writes `value` into word `word` of the buffer of rank `to` when all
  // that the current stream holds is over and visible.
  virtual void signal(int to, int64_t word, uint32_t value) = 0;
  // What the current stream is given from now on starts when the own word, which rank `from`
  // writes, has reached `value`.
  virtual void await(int from, int64_t word, uint32_t value) = 0;
};

struct SharedMemory {
  std::shared_ptr<PeerMemory> peers;  // null: not possible here
  std::string obstacle;               // then why, for a log line; the same on every rank
};

// Every rank shows `buffer` (contiguous, allocated by libtorch; sizes may differ) to the others and
// gets access to theirs. Collective over `group`, whose ranks all get access, or none does: when
// they are processes on CPUs, on several hosts, or on GPUs that cannot read one another's memory.
SharedMemory share_memory(const at::Tensor& buffer, const ProcessGroup& group);

}  // namespace megatron
