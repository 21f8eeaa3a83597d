// How long a step takes, from speeds that the user knows: what a rank attains in matrix products,
// and what it sends inside of a machine and between machines. Arithmetic and the replay of the
// schedule; no GPU.
//
//   ideal      floating-point operations of the model over all ranks, at the attained rate
//   schedule   the replay of passes without recomputation, minus ideal: waits, and stages of
//              different work
//   recompute  the replay with recomputation, minus the one before
//   tensor     ... with the traffic of tp: all of forward's; of backward's, what does not fit under
//              weight gradients, which half of it may overlap with
//   context    ... with that of cp: of p2p what does not fit under attention, of the other types
//              all
//   pipeline   ... with transfers between stages and the calls of all stages
//   data       of gradients what does not fit under the last backward (--overlap-grad-reduce; else
//              all), of weights what does not fit under the first forward (--overlap-param-gather);
//              where they are gathered in every pass, under that pass; and the sums of partial
//              gradients and of tied tables
//
// Bytes are those of communication_estimate.h; latencies, the optimizer's arithmetic and waits for
// data are left out.
#pragma once

#include <cstdint>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct MachineSpeeds {
  double flops = 0;              // per second and rank, attained
  double inside_bandwidth = 0;   // bytes per second that a rank sends to ranks of its machine
  double network_bandwidth = 0;  // ... to other machines
  int64_t ranks_per_machine = 8;
};

struct StepEstimate {
  double ideal = 0, schedule = 0, recompute = 0, tensor = 0, context = 0, pipeline = 0,
         data = 0;  // seconds
  double total() const { return ideal + schedule + recompute + tensor + context + pipeline + data; }
  double efficiency() const { return ideal / total(); }
};

StepEstimate estimate_step(const LayoutPlan& plan, const MachineSpeeds& speeds);

}  // namespace megatron
