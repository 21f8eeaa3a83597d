#include "megatron/training/tasks/tasks.h"

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

namespace {

struct Entry {
  const char* name;
  PretrainTask (*make)(const Arguments&);
};

constexpr Entry kTasks[] = {
#define MEGATRON_TASK_ENTRY(name) {#name, name##_task},
    MEGATRON_TASKS(MEGATRON_TASK_ENTRY)
#undef MEGATRON_TASK_ENTRY
};

}  // namespace

PretrainTask find_task(const Arguments& arguments) {
  const std::string& name = arguments.training.task;
  for (const Entry& entry : kTasks)
    if (name == entry.name) return entry.make(arguments);
  throw UsageError(
      cat("--task ", name, " is unknown\nhint: known tasks: ", listed(kTasks, &Entry::name)));
}

}  // namespace megatron
