// Layers that cost different times and bytes, divided over stages of one or several segments each.
// Without libtorch.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

struct LayerLoad {
  double time = 0;     // in any unit
  double weights = 0;  // bytes that a stage holds once
  double saved = 0;    // bytes that it holds for each micro-batch in flight
};

struct StageLoads {
  std::vector<LayerLoad> layers;
  LayerLoad embedding, head;      // with the first and the last segment
  std::vector<double> in_flight;  // micro-batches of each stage; their number is that of the stages
  int64_t chunks = 1;             // segments of each stage
  ChunkPlacement placement = ChunkPlacement::kLooped;
};

// How many layers each segment holds, one or more: such that the largest time of a stage is least,
// then its largest memory, then that segments end early. With several segments per stage that is
// the best of all divisions if these are at most some ten thousand, else the best that moving one
// end at a time finds. There are at least as many layers as segments.
std::vector<int64_t> divide_over_stages(const StageLoads& loads);

}  // namespace megatron
