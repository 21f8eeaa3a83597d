// Graceful shutdown by signals: at the first signal the loop saves and stops, at the second the
// process exits at once.
#pragma once

namespace megatron {

// What is written at the first and at the second signal.
struct SignalTexts {
  const char* first =
      "\nsignal received: the run stops at the next step, and saves if it has --save; a second "
      "signal stops it at once\n";
  const char* second = "\nsecond signal: stopping at once, nothing is saved\n";
};

// Handles SIGTERM, SIGINT and `signal_number` during its lifetime. At most one instance per process
// at a time.
class SignalHandler {
 public:
  explicit SignalHandler(int signal_number, SignalTexts texts = {});
  ~SignalHandler();
  SignalHandler(const SignalHandler&) = delete;
  SignalHandler& operator=(const SignalHandler&) = delete;
  // The first signal received, or 0.
  int received() const;
};

}  // namespace megatron
