#include "megatron/training/tasks/tasks.h"

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/models/model_table.h"

namespace megatron {

using TaskRow = const TaskType&();
// The task that a file defines as NAME_task_type().
#define MEGATRON_TASK(name)          \
  [] {                               \
    extern TaskRow name##_task_type; \
    return &name##_task_type();      \
  }()

const std::vector<const TaskType*>& task_types() {
  static const std::vector<const TaskType*> types = {
      MEGATRON_TASK(gpt),
      MEGATRON_TASK(sft),
      MEGATRON_TASK(dpo),
      MEGATRON_TASK(retro),
      MEGATRON_TASK(mimo),
      // Encoders
      MEGATRON_TASK(bert),
      MEGATRON_TASK(classify),
      MEGATRON_TASK(multichoice),
      MEGATRON_TASK(t5),
      MEGATRON_TASK(seq2seq),
  };
  return types;
}

#undef MEGATRON_TASK

std::vector<OwnConfig> own_configs() {
  std::vector<OwnConfig> all;
  const auto add = [&](OwnConfig config) {
    if (config.config() != nullptr) all.push_back(std::move(config));
  };
  for (const ModelType* type : model_types()) add(type->config);
  for (const TaskType* type : task_types()) add(type->config);
  return all;
}

namespace {

// Null: there is none of this name.
const TaskType* find_task_type(std::string_view name) {
  for (const TaskType* type : task_types())
    if (name == type->name) return type;
  return nullptr;
}

}  // namespace

void finalize_task(Arguments& arguments) {
  const TaskType* type = find_task_type(arguments.training.task);
  if (type != nullptr && type->finalize != nullptr) type->finalize(arguments);
}

void validate_task(const Arguments& arguments, Violations& violations) {
  const TaskType* type = find_task_type(arguments.training.task);
  if (type != nullptr && type->validate != nullptr) type->validate(arguments, violations);
}

void shrink_task(Arguments& arguments, const Arguments& before, Shrinker& shrinker) {
  const TaskType* type = find_task_type(arguments.training.task);
  if (type != nullptr && type->shrink != nullptr) type->shrink(arguments, before, shrinker);
}

PretrainTask find_task(std::string_view name, const Arguments& arguments) {
  if (const TaskType* type = find_task_type(name)) return type->make(arguments);
  throw UsageError(cat("--task ", name,
                       " is unknown\nhint: known tasks: ", listed(task_types(), &TaskType::name)));
}

PretrainTask find_task(const Arguments& arguments) {
  return find_task(arguments.training.task, arguments);
}

}  // namespace megatron
