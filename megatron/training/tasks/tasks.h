// The table of everything `megatron pretrain` can train.
#pragma once

#include <string_view>

#include "megatron/training/task.h"

namespace megatron {

PretrainTask gpt_task();
PretrainTask sft_task();

// Throws UsageError naming the known tasks.
PretrainTask find_task(std::string_view name);

}  // namespace megatron
