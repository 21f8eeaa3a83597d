// megatron pretrain: trains a model; see README.

#include <string>

#include "megatron/base/exit_codes.h"
#include "megatron/comm/launch.h"
#include "tools/support/ranks_command.h"
#include "tools/support/training_run.h"

namespace megatron {

extern "C" int megatron_pretrain(int argc, char** argv) {
  const Launch launch = launch_from_environment();
  Arguments arguments;
  RanksCommand command;
  command.parse = [&] {
    arguments = parse_arguments(argc, argv, launch.world_size);
    return arguments.help;
  };
  command.help = [&] {
    const std::string usage =
        "megatron pretrain --num-layers N --hidden-size N --num-attention-heads N --seq-length N "
        "--micro-batch-size N\n"
        "                  --train-iters N --lr X --tokenizer-type T --data-path PREFIX "
        "[flags]\n\n";
    return run_help(usage + std::string(kExitCodesHelp), arguments.configs(), arguments.help_topic);
  };
  command.run = [&] { return run_training(launch, arguments); };
  return run_command(launch, command);
}

}  // namespace megatron
