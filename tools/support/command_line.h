// Runs one command of a table: help, exit codes, and the form of errors.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "megatron/base/exit_codes.h"

namespace megatron {

struct Command {
  std::string_view name;
  int (*run)(int argc, char** argv);
  std::string_view summary;  // one line of `megatron --help`
};

// argv[1] is the command; the rest is its own. Prints every error and returns the exit code; throws
// nothing.
int run_command_line(std::span<const Command> commands, int argc, char** argv);

// The lines printed for an error: "error: " before the first line (before each line that starts
// one, for a usage error), "detail: " before others; lines that start with "detail: " or "hint: "
// stay as they are. `where` is "" or "[rank 3] ".
std::string format_error(std::string_view message, bool usage, std::string_view where);

}  // namespace megatron
