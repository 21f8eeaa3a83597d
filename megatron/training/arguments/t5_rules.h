// What the flags of a run that trains a T5 mean together. Columns of the table of tasks.
#pragma once

#include <string_view>

#include "megatron/training/arguments/arguments.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {

// Whether the model of a task is a T5.
inline bool trains_t5(std::string_view task) { return task == "t5" || task == "seq2seq"; }

// The row of layers and the lengths of both stacks, from either spelling. Idempotent.
void finalize_t5(Arguments& arguments);

void validate_t5(const Arguments& arguments, Violations& violations);

// After the layer's own sizes have been shrunk: both stacks keep one layer or several, the
// decoder's length stays equal to or different from the encoder's.
void shrink_t5(Arguments& arguments, const Arguments& before, Shrinker& shrinker);

}  // namespace megatron
