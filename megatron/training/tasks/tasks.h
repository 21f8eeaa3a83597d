// The table of training tasks.
#pragma once

#include "megatron/training/task.h"

namespace megatron {

PretrainTask gpt_task(const Arguments& arguments = {});
PretrainTask sft_task(const Arguments& arguments = {});
// Direct preference optimisation of a GPT; see dpo_loss.h and preference_data.h.
PretrainTask dpo_task(const Arguments& arguments);

// The task that --task names, with the flags of its own. Throws UsageError naming the known tasks.
PretrainTask find_task(const Arguments& arguments);

}  // namespace megatron
