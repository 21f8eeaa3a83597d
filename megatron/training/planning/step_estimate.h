// Estimates the time of a step from given rates: FLOP/s that a rank attains in GEMMs, and its
// bandwidth within a machine and between machines. Computed by replaying the schedule; no GPU.
//
//   ideal      FLOPs of the model over all ranks, at the attained rate
//   schedule   replay of the schedule without recomputation, minus ideal: pipeline bubbles, and
//              imbalance between stages
//   recompute  the replay with recomputation added, minus the previous one
//   tensor     the replay with exposed communication of tp added, minus the previous one: all of
//              the forward, and of the backward the part that half of the weight-gradient time
//              cannot hide
//   context    ... with exposed communication of cp added: for layers with p2p the part that
//              attention cannot hide, for the other types all
//   expert     ... with communication of ep added, all of it: nothing overlaps with it
//   pipeline   ... with transfers between stages and collectives over all stages added
//   data       exposed communication of dp: of gradients the part that the last backward cannot
//              hide (without --overlap-grad-reduce all), of weights the part that the first
//              forward cannot hide (without --overlap-param-gather all); for reductions and gathers
//              in every pass, the part that the pass cannot hide; and the sums of partial
//              gradients and of tied tables
//
// Bytes are those of communication_estimate.h; latencies, the optimizer's arithmetic and waits for
// data are not included.
#pragma once

#include <cstdint>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct MachineSpeeds {
  double flops = 0;              // per second and rank, attained
  double inside_bandwidth = 0;   // bytes per second from a rank to ranks of its machine
  double network_bandwidth = 0;  // ... to other machines
  int64_t ranks_per_machine = 8;
};

struct StepEstimate {
  double ideal = 0, schedule = 0, recompute = 0, tensor = 0, context = 0, expert = 0, pipeline = 0,
         data = 0;  // seconds
  double total() const {
    return ideal + schedule + recompute + tensor + context + expert + pipeline + data;
  }
  double efficiency() const { return ideal / total(); }
};

StepEstimate estimate_step(const LayoutPlan& plan, const MachineSpeeds& speeds);

}  // namespace megatron
