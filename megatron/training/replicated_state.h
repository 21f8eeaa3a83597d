// Tensors that are replicated over data-parallel ranks: each rank reads and writes a part of them.
#pragma once

#include <vector>

#include "megatron/dist_checkpointing/replica_parts.h"
#include "megatron/distributed/distributed_data_parallel.h"

namespace megatron {

// The parts of `tensors` that this rank writes: a part of each replicated tensor, and tensors
// without replicas as a whole. Together the ranks write every element once. All replicas must call
// it with the same tensors in the same order.
std::vector<StateTensor> parts_to_write(const std::vector<StateTensor>& tensors);

// Reads each tensor once for all of its replicas: each rank reads parts(), and share() broadcasts
// them.
class ReplicatedRead {
 public:
  explicit ReplicatedRead(std::vector<StateTensor> tensors);
  const std::vector<StateTensor>& parts() const { return parts_; }
  // Call after every rank has filled its parts: broadcasts each part to the replicas. Collective
  // over the replicas.
  void share() const;

 private:
  std::vector<StateTensor> tensors_, parts_;
  std::vector<ReplicaPart> plan_;  // for tensors with replicas
};

}  // namespace megatron
