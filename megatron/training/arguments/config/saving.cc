#include "megatron/training/arguments/config/saving.h"

#include "megatron/base/value_checks.h"

namespace megatron {
namespace {

constexpr std::string_view kSaveFailures[] = {"stop", "continue"};

}  // namespace

void SavingConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("checkpointing");
  v.field({"save_interval", "--save-interval --persistent-save-interval"}, save_interval,
          "iterations between checkpoints; default: only at the end");
  v.field("save_retain_interval", save_retain_interval,
          "keep checkpoints whose iteration is a multiple of this, and the newest one");
  v.field("keep_last_checkpoints", keep_last_checkpoints,
          "keep the newest K checkpoints; default: all");
  v.field("async_save", async_save,
          "write checkpoints in the background; a step pays only for the copy to host memory");
  v.choice("save_failure", save_failure, kSaveFailures,
           "what to do when a checkpoint cannot be written");
  v.field(
      {"save_frozen", "--no-save-frozen", true}, save_frozen,
      "leave frozen weights out of checkpoints (adapters alone with --lora-rank); a resume takes "
      "them from --pretrained-checkpoint");
  v.field("no_save_optim", no_save_optim, "leave the optimizer's state out of checkpoints");
}

void SavingConfig::validate(Violations& v) const {
  at_least(v, "--save-interval", save_interval, 1);
  at_least(v, "--save-retain-interval", save_retain_interval, 1);
  at_least(v, "--keep-last-checkpoints", keep_last_checkpoints, 1);
}

}  // namespace megatron
