// Bytes that one rank of each pipeline stage sends in one training step, by group.
//
// Over n ranks a ring sends, for B bytes of the whole tensor: all-reduce 2 (n-1)/n B; all-gather
// and reduce-scatter (n-1)/n B; all-to-all (n-1)/n of the rank's own part. Letters as in
// transformer/layer/layer_cost.h.
//
//   tp   per micro-batch: what layers and the model's ends send (transformer/attention/
//        attention_cost.h, transformer/feed_forward/mlp_cost.h, models/common/ends_cost.h)
//        full recomputation: the forward of its layers twice
//        saved activations distributed: an all-gather of R h x per recomputed unit in the backward
//        parameters with partial gradients: once per step, fp32
//   cp   per micro-batch: what layers send, with full recomputation the forward twice
//   ep   per micro-batch: what layers with experts send over the ranks that experts are divided
//        over, with full recomputation the forward twice
//   etp  the same over the ranks that the matrices of one expert are divided over
//   pp   per micro-batch: R h x for each neighbouring segment on another stage, forward and
//        backward
//        vocabulary split over the stages (and their tensor ranks): R h x broadcast by the last
//        stage, all-gather of 3 fp32 numbers per token and rank, all-reduce of R h x
//   dp   E buffer elements, sharded over s ranks, with r replicas of each shard:
//          no sharding         all-reduces 4 E
//          states              reduce-scatter 4 E and gather e E
//          gradients           the reduce-scatter once per micro-batch
//          values              gathered in each forward and backward
//          r > 1               all-reduce of 4 E / s
//        With --grad-reduce-in-bf16 2 bytes instead of 4
//   edp  the same of experts, whose ranks with the same weights are others
//   embd tied tables on two stages: all-reduce of the table's gradient over two ranks
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct GroupTraffic {
  std::string group;  // "tp", "cp", "ep", "etp", "pp", "dp", "edp", "embd"
  int64_t ranks = 1;
  double forward = 0;   // bytes sent in the forward passes of one step
  double backward = 0;  // ... in the backward passes, recomputation included
  double once = 0;      // ... once per step: gradients, updated weights
  double total() const { return forward + backward + once; }
};

// Groups of more than one rank, in the order above.
std::vector<GroupTraffic> stage_traffic(const LayoutPlan& plan, int stage);

}  // namespace megatron
