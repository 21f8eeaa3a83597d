// Compares training under a layout of ranks with training on one rank, for the equivalence matrix,
// the random layouts and exact updates.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

struct Proof;

// The arguments of `pretrain FLAGS` as `world_size` ranks. Throws UsageError with every violation.
Arguments parse_run(const std::string& flags, int world_size);

// Trains `steps` steps in `dtype` under the arguments and on one rank, and compares everything
// (compare_traces), in fp64 with allow_grown_rounding(). Returns a line for each of the first
// differences beyond `rtol` and for each fault of the shards; empty: none. The one-rank trace is
// cached for further layouts of the same model. `task` is gpt or dpo. Without `updates` every step
// runs on the initial weights, and states (those of delayed scaling) are equal in bits.
std::string differences_from_one_rank(const Arguments& arguments, c10::ScalarType dtype,
                                      double rtol, int steps, const std::string& task = "gpt",
                                      bool updates = true);

// A line for each quantity of the proofs that differs and for each fault; empty: all hold.
std::string failures(const std::vector<Proof>& proofs);

}  // namespace megatron
