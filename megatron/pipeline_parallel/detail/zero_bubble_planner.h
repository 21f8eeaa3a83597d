// Searches for the merge of forward, input-gradient and weight-gradient passes that ends earliest
// under a memory limit.
#pragma once

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// Returns the best of `start` and of the schedules that a greedy simulation with shape.costs makes
// under several policies: the shortest replayed time, and on a tie the lowest memory. The forward
// passes of a stage keep their order, and so do the backward passes.
//
// Source: Qi et al. 2023 (arXiv:2401.10241) section 3.1.
Schedule plan_zero_bubble(const ScheduleShape& shape, const Schedule& start);

}  // namespace megatron
