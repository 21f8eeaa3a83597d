// Which of the ranks that share a micro-batch encodes which of its images.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace megatron {

// By image the rank: the largest costs come first, equal ones by number, each to the rank with the
// least so far, of equal ones the first. A function of the costs alone, so that all ranks compute
// the same without a message.
std::vector<int> plan_images(std::span<const int64_t> costs, int ranks);

}  // namespace megatron
