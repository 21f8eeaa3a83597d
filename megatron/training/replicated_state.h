// Tensors that several data ranks hold alike: each reads and writes a part of them.
#pragma once

#include <vector>

#include "megatron/dist_checkpointing/replica_parts.h"
#include "megatron/distributed/distributed_data_parallel.h"

namespace megatron {

// What this rank writes of `tensors`: its part of those that its replicas hold too, and all of what
// it alone holds. Together the ranks write every element once. The replicas call it with the same
// tensors in the same order.
std::vector<StateTensor> parts_to_write(const std::vector<StateTensor>& tensors);

// Reads tensors once for all of their replicas: each rank reads parts(), and share() gives everyone
// the rest.
class ReplicatedRead {
 public:
  explicit ReplicatedRead(std::vector<StateTensor> tensors);
  const std::vector<StateTensor>& parts() const { return parts_; }
  // After every rank has filled its parts: each part is broadcast to the replicas. Collective over
  // the replicas.
  void share() const;

 private:
  std::vector<StateTensor> tensors_, parts_;
  std::vector<ReplicaPart> plan_;  // of the tensors that have replicas
};

}  // namespace megatron
