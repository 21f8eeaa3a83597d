// What `pretrain` and `finetune` do.
#pragma once

#include <string>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// Trains as one rank of the job that a launcher started, with the arguments that `parse` finds, or
// prints the help, which begins with `usage`; returns the exit code.
int run_training(int argc, char** argv, Arguments (*parse)(int, const char* const*, int64_t),
                 const std::string& usage);

}  // namespace megatron
