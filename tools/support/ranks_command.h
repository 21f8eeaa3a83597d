// A command that a launcher starts as several ranks, whose flags are parsed on every one of them.
#pragma once

#include <functional>
#include <string>

#include "megatron/comm/launch.h"

namespace megatron {

struct RanksCommand {
  std::function<bool()> parse;  // whether --help is given. Throws UsageError
  std::function<std::string()> help;
  std::function<int()> run;  // returns the exit code
};

// Flags that are wrong on all ranks are told by one of them, and so is the help.
int run_command(const Launch& launch, const RanksCommand& command);

}  // namespace megatron
