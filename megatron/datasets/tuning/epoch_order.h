// The order in which fine-tuning reads the rows of a file.
#pragma once

#include <cstdint>
#include <vector>

namespace megatron {

// Rows in the order of `num_samples` samples, over as many epochs as these need: each epoch has an
// order of its own, from (seed, epoch). 0: one epoch in the order given. `group`: rows that follow
// each other in every order. Throws Error for no rows, or if they are no whole groups.
std::vector<int32_t> epoch_order(int64_t rows, int64_t num_samples, int64_t seed,
                                 int64_t group = 1);

}  // namespace megatron
