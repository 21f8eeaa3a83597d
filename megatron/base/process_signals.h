// Signals that end a process by themselves: what is said before it dies, and those that become
// errors. A thread's polite stop (SIGTERM, SIGINT) is runtime/signals.h.
#pragma once

#include <string>

namespace megatron {

// On SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT: writes who crashed where (rank, process, thread,
// address) and a backtrace to standard error, calls the hook, and lets the signal end the process
// as it would have. Once per process; does nothing under a sanitizer, which reports more.
void install_crash_handler();

// Goes before the message of a crash: "[rank 3] ".
void set_crash_prefix(const std::string& prefix);

// Called in the handler of a crash, on the thread that crashed: only what POSIX allows in a
// handler. Null: none.
using CrashHook = void (*)(int signal);
void set_crash_hook(CrashHook hook);

// "SIGSEGV"; may be called in a handler. Null for signals that have no name here.
const char* signal_name(int signal);

// A file that grows beyond RLIMIT_FSIZE is an error of that write (EFBIG), not the end of the
// process.
void ignore_file_size_signal();

// From now on a reader of standard output who has gone is no error: one warning is logged, and
// lines of results are dropped. For runs that write their results to files, too.
void make_standard_output_optional();

}  // namespace megatron
