// Exit codes of a program, for scripts and schedulers (docs/training.md, "How a run ends").
//
// 0 is a run that finished or, unless --stopped-exit-code says otherwise, one that stopped and can
// be resumed. A process that a signal ends has 128 + its number for a shell, as usual.
#pragma once

namespace megatron {

// Data, configuration or disk: a restart would fail again
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;     // the command line
inline constexpr int kExitInternal = 3;  // a bug of ours
// A peer, a device or the network; EX_TEMPFAIL of sysexits.h
inline constexpr int kExitRetry = 75;

inline constexpr const char* kExitCodesHelp =
    "exit codes (outcome.json in the folder of the run says them in words):\n"
    "  0     finished; also stopped by a signal, --exit-interval or --exit-duration-in-mins, and "
    "resumable\n"
    "  N     stopped and resumable, with --stopped-exit-code N\n"
    "  1     failed, and would fail again: data, configuration, a full disk, losses that are not "
    "finite\n"
    "  2, 3  wrong flags; an internal error\n"
    "  75    failed, but may succeed when started again: a lost rank, a timeout, a device or I/O "
    "error\n"
    "  128+S ended by signal S, nothing saved since the last checkpoint";

}  // namespace megatron
