// Which samples share a sequence: each goes into the first open sequence with room.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace megatron {

// What a sample takes of a sequence: positions, and a second capacity (patches of images).
using SequenceLoad = std::array<int64_t, 2>;

// Appends to `members` the samples of each sequence, one sequence after the other, and to `ends`
// where each ends in it. At most 64 sequences are open: the oldest one is closed when another one
// is needed, a full one at once, and the rest at the end. Every sample fits into `room`.
void pack_first_fit(std::span<const int64_t> samples,
                    const std::function<SequenceLoad(int64_t sample)>& load, SequenceLoad room,
                    std::vector<int64_t>& members, std::vector<int64_t>& ends);

}  // namespace megatron
