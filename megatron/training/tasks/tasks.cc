#include "megatron/training/tasks/tasks.h"

#include "megatron/base/check.h"

namespace megatron {

namespace {

struct Entry {
  const char* name;
  PretrainTask (*make)();
};

constexpr Entry kTasks[] = {
    {"gpt", gpt_task},
    {"sft", sft_task},
};

}  // namespace

PretrainTask find_task(std::string_view name) {
  std::string known;
  for (const Entry& entry : kTasks) {
    if (name == entry.name) return entry.make();
    known += cat(known.empty() ? "" : ", ", entry.name);
  }
  throw UsageError(cat("--task ", name, " is unknown\nhint: known tasks: ", known));
}

}  // namespace megatron
