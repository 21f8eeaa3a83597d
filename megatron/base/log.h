// Log lines on standard error, and the terminal's status line on standard error when it is a
// terminal. Thread safe.
#pragma once

#include <string>
#include <string_view>

namespace megatron {

void set_log_prefix(std::string prefix);  // e.g. "[rank 3] "
// Drops lines of results, the status line and log lines below a warning: only the first rank of a
// job prints them.
void set_quiet(bool quiet);
void log_info(std::string_view message);
void log_warning(std::string_view message);  // "warning: ..."
void log_error(std::string_view message);    // "error: ..."

// Prints a line of results to standard output (the training log line), above the status line. A
// write error is kept for check_standard_output(): a full disk under a redirected log should not
// stop training.
void print_line(std::string_view line);

// Throws Error if a line of results could not be written since the last call.
void check_standard_output();

// Whether standard error is a terminal.
bool is_terminal();

// Replaces the status line (one line, cut to the terminal's width); does nothing if standard error
// is not a terminal.
void set_status_line(std::string_view text);

}  // namespace megatron
