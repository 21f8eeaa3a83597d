// Shapes of pipelines for tests.
#pragma once

#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/pipeline_parallel/schedule.h"
#include "tests/unit/error_of.h"

namespace megatron {

constexpr ScheduleKind kAllKinds[] = {ScheduleKind::k1F1B, ScheduleKind::kGPipe,
                                      ScheduleKind::kZeroBubbleH1, ScheduleKind::kZeroBubbleAuto,
                                      ScheduleKind::kZeroBubbleV};

inline ScheduleShape shape_of(int stages, int chunks, int microbatches, int group = 0) {
  ScheduleShape shape;
  shape.num_stages = stages;
  shape.num_chunks = chunks;
  shape.num_microbatches = microbatches;
  shape.group_size = group;
  return shape;
}

}  // namespace megatron
