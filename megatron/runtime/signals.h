// Graceful shutdown by signals: at the first signal the loop saves and stops, at the second the
// process exits at once.
#pragma once

namespace megatron {

// Handles SIGTERM, SIGINT and `signal_number` during its lifetime. At most one instance per process
// at a time.
class SignalHandler {
 public:
  explicit SignalHandler(int signal_number);
  ~SignalHandler();
  SignalHandler(const SignalHandler&) = delete;
  SignalHandler& operator=(const SignalHandler&) = delete;
  // The first signal received, or 0.
  int received() const;
};

}  // namespace megatron
