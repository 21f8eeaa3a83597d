// The table of training tasks.
#pragma once

#include "megatron/training/task.h"

// Task NAME is one entry here and NAME_task() in a file of its own.
#define MEGATRON_TASKS(TASK)                             \
  TASK(gpt) /* the next token of text */                 \
  TASK(sft) /* conversations: the same model and loss */ \
  TASK(dpo) /* pairs of responses, see dpo_loss.h */

namespace megatron {

#define MEGATRON_DECLARE_TASK(name) PretrainTask name##_task(const Arguments& arguments = {});
MEGATRON_TASKS(MEGATRON_DECLARE_TASK)
#undef MEGATRON_DECLARE_TASK

// The task that --task names, with the flags of its own. Throws UsageError naming the known tasks.
PretrainTask find_task(const Arguments& arguments);

}  // namespace megatron
