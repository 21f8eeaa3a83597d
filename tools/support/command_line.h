// Runs one command of a table: help, exit codes, and error output.
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

// argv[1] is the command; the rest are its arguments. Prints all errors and returns the exit code;
// does not throw.
int run_command_line(std::span<const Command> commands, int argc, char** argv);

// The lines printed for an error: "error: " before the first line (for a usage error, before each
// line that starts one), "detail: " before others; lines that start with "detail: " or "hint: " are
// unchanged. `where` is "" or "[rank 3] ".
std::string format_error(std::string_view message, bool usage, std::string_view where);

}  // namespace megatron
