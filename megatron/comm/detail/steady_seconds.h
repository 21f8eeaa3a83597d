// The clock of deadlines and intervals.
#pragma once

#include <chrono>

namespace megatron {

// Seconds since some moment, never set back.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace megatron
