// megatron finetune: fine-tunes a model on conversations or preferences; see docs/fine_tuning.md.
#include <string>

#include "megatron/base/exit_codes.h"
#include "megatron/comm/launch.h"
#include "tools/support/ranks_command.h"
#include "tools/support/training_run.h"

namespace megatron {

extern "C" int megatron_finetune(int argc, char** argv) {
  const Launch launch = launch_from_environment();
  Arguments arguments;
  RanksCommand command;
  command.parse = [&] {
    arguments = parse_finetune_arguments(argc, argv, launch.world_size);
    return arguments.help;
  };
  command.help = [&] {
    const std::string usage =
        "megatron finetune --load MODEL --train-data-path CONVERSATIONS --seq-length N "
        "--micro-batch-size N\n"
        "                  --train-iters N --lr X [--task sft|dpo] [--save FOLDER] [flags of "
        "pretrain]\n\n"
        "MODEL is a folder of checkpoints or of Hugging Face; its model and tokenizer are used "
        "unless flags say otherwise.\n"
        "When --save holds checkpoints of this run already, it goes on from there.\n\n";
    return run_help(usage + std::string(kExitCodesHelp), arguments.configs(), arguments.help_topic);
  };
  command.run = [&] { return run_training(launch, arguments); };
  return run_command(launch, command);
}

}  // namespace megatron
