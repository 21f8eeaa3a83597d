// Signals that end a run politely: the first asks the loop to save and to leave, the second leaves
// at once.
#pragma once

namespace megatron {

// Handles SIGTERM and SIGINT (and `signal_number`, when it is another one) while it lives. One at a
// time per process.
class SignalHandler {
 public:
  explicit SignalHandler(int signal_number);
  ~SignalHandler();
  SignalHandler(const SignalHandler&) = delete;
  SignalHandler& operator=(const SignalHandler&) = delete;
  // The signal that was received first, or 0.
  int received() const;
};

}  // namespace megatron
