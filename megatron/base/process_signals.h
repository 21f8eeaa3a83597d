// Signals that would kill the process: crash reports, and signals that become errors. Graceful
// stops of a run (SIGTERM, SIGINT) are in runtime/signals.h.
#pragma once

#include <string>

namespace megatron {

// On SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT: writes what crashed where (rank, process, thread,
// address) and a backtrace to standard error, calls the hook, and lets the signal end the process
// as usual. Once per process; does nothing under a sanitizer, which reports more.
void install_crash_handler();

// Prefix of crash messages: "[rank 3] ".
void set_crash_prefix(const std::string& prefix);

// Called in the crash handler, on the thread that crashed; must be async-signal-safe. Null: none.
using CrashHook = void (*)(int signal);
void set_crash_hook(CrashHook hook);

// "SIGSEGV"; async-signal-safe. Null for unknown signals.
const char* signal_name(int signal);

// Makes a file that grows beyond RLIMIT_FSIZE an error of that write (EFBIG) instead of ending the
// process.
void ignore_file_size_signal();

// From now on a closed reader of standard output is not an error: one warning is logged, and lines
// of results are dropped. For runs that also write their results to files.
void make_standard_output_optional();

}  // namespace megatron
