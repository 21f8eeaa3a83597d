// Reductions and gathers of small tensors between GPUs of one host that reach each other's memory,
// each by one kernel.
//
// Goal: the sums of tensor parallelism in decoding steps, where the latency of a collective counts
// and everything is captured in CUDA graphs. Non-goals: several hosts, ranks on CPUs, more than
// kMostRanks ranks, transfers beside compute (comm/peer_mailbox.h).
//
// Values are combined in the order of ranks, bf16 and fp16 in fp32 and rounded once, as the
// collectives of ranks on CPUs do; NCCL's order depends on an element's place. See Note [Lines with
// flags] in kernels/peers/one_shot.h.
//
// If a rank fails, its peers' kernels wait for it; the failure monitor ends the job.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "megatron/comm/peer_memory.h"
#include "megatron/comm/process_group.h"

namespace megatron {

class PeerCollectives {
 public:
  static constexpr int kMostRanks = 8;
  // Room with which reductions of any size, in pieces, are not much slower than NCCL's.
  static constexpr int64_t kRoomForAll = int64_t{4} << 20;
  // Memory of one rank for tensors of up to `most_bytes`; larger ones than kRoomForAll go through
  // its inbox in pieces.
  static int64_t memory_bytes(int64_t group_size, int64_t most_bytes);

  explicit PeerCollectives(const ProcessGroup& group) : group_(group) {}

  // Makes room for tensors of up to `most_bytes`, the same on all ranks, which have no call in
  // flight. Collective. Does nothing if peers cannot be reached (obstacle()) or there is room.
  void open(at::Device device, int64_t most_bytes);
  bool is_open() const { return peers_ != nullptr; }
  const std::string& obstacle() const { return obstacle_; }  // why open() failed
  // From now on the group's reductions of tensors of any size are these, so that their bits do not
  // depend on an element's place. Throws Error if open() failed.
  void take_all_reductions();

  bool takes_reduction(const at::Tensor& tensor) const;
  bool takes_gather(const at::Tensor& tensor) const;
  bool takes_scatter(const at::Tensor& tensor) const {
    return takes_all_ && takes_reduction(tensor);
  }

  // Like those of ProcessGroup, on the current stream, in which all calls of a rank must lie; may
  // be captured in a graph. `addend`, of the tensor's type: is added to the rounded sum; `factors`
  // [rows], fp32: powers of two by which this rank's rows of the tensor are multiplied first, if
  // takes_factors(); undefined: none.
  void all_reduce(const at::Tensor& tensor, ReduceOp op, const at::Tensor& addend = {},
                  const at::Tensor& factors = {});
  bool takes_factors(const at::Tensor& tensor, const at::Tensor& factors) const;
  void all_gather(const at::Tensor& output, const at::Tensor& input);

 private:
  const ProcessGroup group_;
  std::shared_ptr<PeerMemory> peers_;
  at::Tensor inbox_, calls_;
  int64_t most_bytes_ = 0, room_ = 0;  // of a tensor, of a piece
  bool takes_all_ = false;
  std::string obstacle_;
};

// In batch-invariant mode over more than two GPUs, those of the group, taking all its reductions as
// long as they are held; else null. Collective. Throws Error if the ranks cannot reach each other's
// memory.
std::shared_ptr<PeerCollectives> ordered_reductions(const ProcessGroup& group, at::Device device);

}  // namespace megatron
