// Which rank writes which bytes of a checkpoint. Computed from the layout: equal to what
// DistributedDataParallel::describe() reports on every rank, without running them.
//
// Every element of a logical tensor is written once: sharded elements by the rank that holds the
// slice of the bucket, elements replicated over data ranks (or instances) or tensor ranks by the
// first of them, a tied table on two stages by the first stage. Padding of the vocabulary and of
// buffers is not written. Per element: the weight in the model's type, and with the optimizer its
// master weight and moments.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct CheckpointPlan {
  std::vector<int64_t> bytes;  // by rank of the job; 0: writes no file
  int64_t total = 0;
  int64_t files = 0;           // tensor files
  int64_t fragments = 0;       // entries of the manifest
  int64_t manifest_bytes = 0;  // estimate: 200 per fragment, 16 per block checksum
  int fullest = 0;             // the rank that writes the most bytes
  int64_t most() const { return bytes.at(static_cast<size_t>(fullest)); }
  // Seconds until the last rank is done, at these bytes per second of one rank and of all ranks
  // together (0: no limit).
  double seconds(double rank_bandwidth, double total_bandwidth) const;
};

CheckpointPlan make_checkpoint_plan(const LayoutPlan& plan);

}  // namespace megatron
