// What stops a run before its last step: intervals, time and signals.
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/base/fields.h"

namespace megatron {

enum class ExitSignal { kTerm, kInt, kUsr1, kUsr2 };

struct ExitConfig {
  std::optional<int64_t> exit_interval, exit_duration_in_mins;
  bool exit_signal_handler = true;
  ExitSignal exit_signal = ExitSignal::kTerm;
  // Time between a signal and the kill that follows it
  std::optional<int64_t> exit_signal_grace_seconds;
  // Exit code of a run that was stopped and can be resumed; default: 0
  std::optional<int64_t> stopped_exit_code;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;

  int exit_signal_number() const;
};

}  // namespace megatron
