#include "tools/support/ranks_command.h"

#include "megatron/base/check.h"
#include "megatron/base/exit_codes.h"
#include "megatron/base/log.h"
#include "megatron/comm/rendezvous.h"

namespace megatron {

int run_command(const Launch& launch, const RanksCommand& command) {
  bool help = false;
  try {
    help = command.parse();
  } catch (const UsageError&) {
    if (refuse_to_start(launch, kExitUsage)) throw;
    return kExitUsage;  // another rank says what is wrong
  }
  if (!help) return command.run();
  if (launch.rank == 0) print_line(command.help());
  return 0;
}

}  // namespace megatron
