// What `pretrain` and `finetune` do with their arguments.
#pragma once

#include "megatron/comm/launch.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {

// Trains as one rank of the job; returns the exit code.
int run_training(const Launch& launch, const Arguments& arguments);

}  // namespace megatron
