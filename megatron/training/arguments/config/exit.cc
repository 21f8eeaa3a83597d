#include "megatron/training/arguments/config/exit.h"

#include <csignal>

#include "megatron/base/exit_codes.h"
#include "megatron/base/value_checks.h"

namespace megatron {
namespace {

constexpr std::string_view kSignals[] = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"};

}  // namespace

void ExitConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("training");
  v.field("exit_interval", exit_interval, "save and stop when the iteration is a multiple of this");
  v.field("exit_duration_in_mins", exit_duration_in_mins,
          "save and stop so early that the checkpoint is written within this many minutes");
  v.field({"exit_signal_handler", "--no-exit-signal-handler", true}, exit_signal_handler,
          "let signals end the process as usual; by default the first one saves and stops, the "
          "second stops at once");
  v.choice("exit_signal", exit_signal, kSignals, "handled besides SIGTERM and SIGINT");
  v.field("exit_signal_grace_seconds", exit_signal_grace_seconds,
          "how long after a signal the process is killed: a run whose step and save take longer "
          "says so; default: 30 under torchrun");
  v.field(
      "stopped_exit_code", stopped_exit_code,
      "exit code of a run that was stopped by a signal, --exit-interval or "
      "--exit-duration-in-mins and can be resumed; default: 0. Not under torchrun, which starts "
      "ranks again after any other code");
}

void ExitConfig::validate(Violations& v) const {
  at_least(v, "--exit-interval", exit_interval, 1);
  at_least(v, "--exit-duration-in-mins", exit_duration_in_mins, 0);
  at_least(v, "--exit-signal-grace-seconds", exit_signal_grace_seconds, 1);
  if (!stopped_exit_code) return;
  const int64_t code = *stopped_exit_code;
  v.require(code >= 0 && code <= 125, cat("--stopped-exit-code is ", code),
            "give 0, or 4 to 125: shells use those above");
  for (const int taken : {kExitFailure, kExitUsage, kExitInternal, kExitRetry})
    v.require(code != taken, cat("--stopped-exit-code is ", code, ", which stands for a failure"),
              "give another one, such as 85");
}

int ExitConfig::exit_signal_number() const {
  static constexpr int kNumbers[] = {SIGTERM, SIGINT, SIGUSR1, SIGUSR2};
  return kNumbers[static_cast<int>(exit_signal)];
}

}  // namespace megatron
