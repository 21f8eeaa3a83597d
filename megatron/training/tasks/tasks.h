// The table of training tasks.
#pragma once

#include "megatron/training/task.h"

namespace megatron {

PretrainTask gpt_task(const Arguments& arguments = {});
PretrainTask sft_task(const Arguments& arguments = {});
// Direct preference optimisation of a GPT; see dpo_loss.h and preference_data.h.
PretrainTask dpo_task(const Arguments& arguments);

// By name; `dpo` is used by that task only. Throws UsageError naming the known tasks.
PretrainTask find_task(std::string_view name, const DpoConfig& dpo = {});

}  // namespace megatron
