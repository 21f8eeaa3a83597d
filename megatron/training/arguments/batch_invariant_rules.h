// Rules of batch-invariant mode for training.
#pragma once

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// With --batch-invariant-mode: a forward that trains can have the bits of one that serves.
void validate_served_bits(const Arguments& arguments, Violations& violations);

}  // namespace megatron
