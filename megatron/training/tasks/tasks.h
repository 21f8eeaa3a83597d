// The table of everything `megatron pretrain` can train.
#pragma once

#include <string_view>

#include "megatron/training/arguments/dpo_config.h"
#include "megatron/training/task.h"

namespace megatron {

PretrainTask gpt_task();
PretrainTask sft_task();
// Direct preference optimisation of a GPT; see dpo_loss.h and preference_data.h.
PretrainTask dpo_task(const DpoConfig& config);

// By name; the options of dpo matter to that task alone. Throws UsageError naming the known tasks.
PretrainTask find_task(std::string_view name, const DpoConfig& dpo = {});

}  // namespace megatron
