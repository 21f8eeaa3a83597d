#include "tools/support/training_run.h"

#include "megatron/base/exit_codes.h"
#include "megatron/comm/launch.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/training/training_job.h"
#include "tools/support/ranks_command.h"
#include "tools/support/torch_version.h"

namespace megatron {

int run_training(int argc, char** argv, Arguments (*parse)(int, const char* const*, int64_t),
                 const std::string& usage) {
  const Launch launch = launch_from_environment();
  Arguments arguments;
  RanksCommand command;
  command.parse = [&] {
    arguments = parse(argc, argv, launch.world_size);
    return arguments.help;
  };
  command.help = [&] {
    return run_help(usage + std::string(kExitCodesHelp), arguments.configs(), arguments.help_topic);
  };
  command.run = [&] {
    return run_job(launch, arguments, [&](const Job& job) {
      Versions libraries;
      megatron_torch_versions(libraries);
      return pretrain(find_task(arguments), arguments, job, libraries);
    });
  };
  return run_command(launch, command);
}

}  // namespace megatron
