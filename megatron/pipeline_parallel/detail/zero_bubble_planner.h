// Finds the merge of forward, input-gradient and weight passes that ends earliest under a memory
// limit.
#pragma once

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// The best of `start` and of lists that a greedy simulation makes with shape.costs under several
// policies: by replayed time, among equals the one that holds least. The forward passes of a stage
// keep their order, and so do the backward ones.
//
// Source: Qi et al. 2023 (arXiv:2401.10241) section 3.1.
Schedule plan_zero_bubble(const ScheduleShape& shape, const Schedule& start);

}  // namespace megatron
