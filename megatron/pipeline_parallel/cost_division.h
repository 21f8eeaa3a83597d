// Layers that cost different times, divided over the segments of a pipeline. Without libtorch.
#pragma once

#include <cstdint>
#include <vector>

namespace megatron {

// How many of `layers`, costs in any unit, each of `segments` segments holds: one or more, so that
// the most costly segment costs as little as can be; of such divisions the one whose segments
// differ least, with more layers in later segments, which hold fewer micro-batches. `head`: of what
// comes with the last segment. There are at least as many layers as segments.
std::vector<int64_t> divide_by_cost(const std::vector<double>& layers, double head,
                                    int64_t segments);

}  // namespace megatron
