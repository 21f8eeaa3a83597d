// The table of training tasks.
//
// A new task is one file like dpo.cc and its line in tasks.cc. Its flags and its model follow from
// the row.
#pragma once

#include <string_view>
#include <vector>

#include "megatron/training/task.h"

namespace megatron {

const std::vector<const TaskType*>& task_types();

// The task of this name, with the flags of its own. Throws UsageError naming the known tasks.
PretrainTask find_task(std::string_view name, const Arguments& arguments);
// The one that --task names.
PretrainTask find_task(const Arguments& arguments);

// TaskType::shrink of the arguments' task.
void shrink_task(Arguments& arguments, const Arguments& before, Shrinker& shrinker);

// The next token of text; others change what they do otherwise.
PretrainTask gpt_task(const Arguments& arguments = {});

// PretrainTask::flops_per_token of the models of a provider.
double model_flops_per_token(const ModelProvider& provider, const Arguments& arguments,
                             const Vocabulary& vocabulary);

}  // namespace megatron
