// megatron finetune: goes on training a model, on conversations or preferences; see
// docs/fine_tuning.md.
#include <string>

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/launch.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/training/training_job.h"
#include "tools/commands.h"
#include "tools/support/torch_version.h"

namespace megatron {

int megatron_finetune(int argc, char** argv) {
  const Launch launch = launch_from_environment();
  Arguments arguments;
  try {
    arguments = parse_finetune_arguments(argc, argv, launch.world_size);
  } catch (const UsageError&) {
    if (refuse_to_start(launch, kExitUsage)) throw;
    return kExitUsage;  // another rank says what is wrong
  }
  if (arguments.help) {
    const std::string usage =
        "megatron finetune --load MODEL --train-data-path CONVERSATIONS --seq-length N "
        "--micro-batch-size N\n"
        "                  --train-iters N --lr X [--task sft|dpo] [--save FOLDER] [flags of "
        "pretrain]\n\n"
        "MODEL is a folder of checkpoints or of Hugging Face; its model and tokenizer are used "
        "unless flags say otherwise.\n"
        "When --save holds checkpoints of this run already, it goes on from there.\n\n" +
        std::string(kExitCodesHelp);
    if (launch.rank == 0) print_line(run_help(usage, arguments.configs(), arguments.help_topic));
    return 0;
  }
  return run_job(launch, arguments, [&](const Job& job) {
    Versions libraries;
    megatron_torch_versions(libraries);
    return pretrain(find_task(arguments.training.task, arguments.dpo), arguments, job, libraries);
  });
}

}  // namespace megatron
