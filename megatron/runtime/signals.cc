#include "megatron/runtime/signals.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <map>

#include "megatron/base/check.h"
#include "megatron/runtime/run_outcome.h"

namespace megatron {

namespace {

std::atomic<int> received_signal{0};
std::atomic<bool> active{false};
SignalTexts shown;
std::map<int, struct sigaction> previous_actions;

void write_text(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

// Async-signal-safe.
void on_signal(int number) {
  int none = 0;
  if (received_signal.compare_exchange_strong(none, number)) {
    write_text(shown.first);
    return;
  }
  write_text(shown.second);
  write_outcome_of_signal(number);
  _exit(128 + number);
}

}  // namespace

SignalHandler::SignalHandler(int signal_number, SignalTexts texts) {
  MEGATRON_ASSERT(!active.exchange(true), "two signal handlers at a time");
  received_signal = 0;
  shown = texts;
  for (int number : {SIGTERM, SIGINT, signal_number}) {
    if (previous_actions.count(number)) continue;
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, &previous_actions[number]);
  }
}

SignalHandler::~SignalHandler() {
  for (const auto& [number, action] : previous_actions) sigaction(number, &action, nullptr);
  previous_actions.clear();
  active = false;
}

int SignalHandler::received() const { return received_signal; }

}  // namespace megatron
