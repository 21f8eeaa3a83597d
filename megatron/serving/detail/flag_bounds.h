// Bounds of the server's flags.
#pragma once

#include "megatron/base/check.h"
#include "megatron/base/fields.h"

namespace megatron {

constexpr double kMaxFlagSeconds = 1e6;

inline void require_seconds(Violations& violations, const char* flag, double value) {
  violations.require(value > 0.0 && value <= kMaxFlagSeconds,
                     cat(flag, " ", value, " is outside (0, ", kMaxFlagSeconds, "]"));
}

inline void require_count(Violations& violations, const char* flag, int64_t value, int64_t low,
                          int64_t high) {
  violations.require(value >= low && value <= high,
                     cat(flag, " ", value, " is outside [", low, ", ", high, "]"));
}

}  // namespace megatron
