// What a patch of this folder shows of the feature that it adds, by the flags of a run.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// A layout of ranks: flags in addition to those of the model.
struct ProvedLayout {
  const char* name;
  int ranks;
  const char* flags;
};
inline void PrintTo(const ProvedLayout& layout, std::ostream* out) { *out << layout.flags; }

// TP with sequence parallelism, PP, ZeRO-1, ZeRO-3, context parallelism, and mixtures.
std::vector<ProvedLayout> proved_layouts();

// Trains a few steps in fp64 under the layout and on one rank; a line for each of the first
// differences beyond 1e-10, and for each fault of the shards. Empty: none.
std::string differences_in_fp64(const std::string& flags, int ranks);

// What `megatron prove` finds, with ranks as threads; empty: the layout holds, in fp64 and in the
// type of the run.
std::string unproved(const std::string& flags, int ranks);

// Bytes of a rank on the CPU in two training steps: the peak by the plan, and as the allocator
// counts it.
struct RankMemory {
  int64_t planned = 0, metered = 0;
};
std::vector<RankMemory> memory_of_ranks(const std::string& flags, int ranks);

}  // namespace megatron
