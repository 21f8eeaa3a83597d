// Bytes that one rank of each pipeline stage sends in one training step, by group.
//
// Over n ranks a ring sends, for B bytes of the whole tensor: all-reduce 2 (n-1)/n B; all-gather
// and reduce-scatter (n-1)/n B; all-to-all (n-1)/n of the rank's own part. Letters as in
// activation_estimate.h, M micro-batches, L layers of the stage.
//
//   tp   per layer and micro-batch, T h e each:
//          no sequence parallelism  forward 2 all-reduces (linear_proj, linear_fc2); backward 2
//                                   (inputs of linear_qkv, linear_fc1)
//          sequence parallelism     forward 2 all-gathers, 2 reduce-scatters; backward 2
//                                   reduce-scatters, 2 all-gathers of gradients and 2 of the norms'
//                                   outputs
//        full recomputation: the forward ones twice; mlp recomputed: those of linear_fc1 and
//        linear_fc2
//        saved activations distributed: an all-gather of R h x per recomputed unit in the backward
//        fewer KV groups than ranks: output of linear_qkv gathered forward, its gradient scattered
//        backward, over the ranks that share a group
//        embedding: T h e all-reduced (reduce-scattered; gathered backward)
//        head: T h of the gradient (gathered; scattered backward)
//        loss: three fp32 numbers per token
//        parameters with partial gradients: once per step, fp32
//   cp   per layer and micro-batch: K = bytes of this rank's keys and values, W the same in fp32,
//        Q of its queries
//          p2p         (c-1) K forward, (c-1) K + c W backward
//          all_gather  (c-1) K forward, (c-1) (K + W) backward
//          a2a         (c-1)/c (2 Q + K) forward and again backward
//          a2a+p2p     a2a over the inner ranks, then p2p over the outer ones
//        core_attn recomputed: p2p and all_gather of the forward again
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
//   embd tied tables on two stages: all-reduce of the table's gradient over two ranks
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct GroupTraffic {
  std::string group;  // "tp", "cp", "pp", "dp", "embd"
  int64_t ranks = 1;
  double forward = 0;   // bytes sent in the forward passes of one step
  double backward = 0;  // ... in the backward passes, recomputation included
  double once = 0;      // ... once per step: gradients, updated weights
  double total() const { return forward + backward + once; }
};

// Groups of more than one rank, in the order above.
std::vector<GroupTraffic> stage_traffic(const LayoutPlan& plan, int stage);

}  // namespace megatron
