// How much of its data a run reads, for the log.
#pragma once

#include <cstdint>
#include <string>

#include "megatron/datasets/dataset.h"

namespace megatron {

// "reads 8,192,000 tokens (1,000 samples of 8,192), 1.25 epochs"; for a blend, the largest number
// of epochs of a member. Without epochs for datasets that are neither text nor a blend of texts.
std::string reading_summary(const Dataset& dataset, int64_t num_samples);

}  // namespace megatron
