// The one clock of an engine.
#pragma once

#include <chrono>
#include <cstdint>

namespace megatron {

// Nanoseconds that only rise, from an unspecified beginning. Thread safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t now_ns() const = 0;
};

// The machine's monotonic clock.
class MonotonicClock final : public Clock {
 public:
  int64_t now_ns() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace megatron
