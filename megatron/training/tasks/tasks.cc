#include "megatron/training/tasks/tasks.h"

#include "megatron/base/check.h"

namespace megatron {

namespace {

struct Entry {
  const char* name;
  PretrainTask (*make)(const DpoConfig&);
};

constexpr Entry kTasks[] = {
    {"gpt", [](const DpoConfig&) { return gpt_task(); }},
    {"sft", [](const DpoConfig&) { return sft_task(); }},
    {"dpo", dpo_task},
};

}  // namespace

PretrainTask find_task(std::string_view name, const DpoConfig& dpo) {
  std::string known;
  for (const Entry& entry : kTasks) {
    if (name == entry.name) return entry.make(dpo);
    known += cat(known.empty() ? "" : ", ", entry.name);
  }
  throw UsageError(cat("--task ", name, " is unknown\nhint: known tasks: ", known));
}

}  // namespace megatron
