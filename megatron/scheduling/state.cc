#include "megatron/scheduling/state.h"

namespace megatron {

std::string_view name(RequestState state) {
  static constexpr std::array<std::string_view, kNumRequestStates> kNames = {
      "queued", "prefill", "decode", "preempted", "finished"};
  return kNames.at(static_cast<size_t>(state));
}

std::string_view name(RequestEvent event) {
  static constexpr std::array<std::string_view, kNumRequestEvents> kNames = {
      "scheduled", "chunk done",   "token",          "out of blocks", "cancel",
      "deadline",  "pause(abort)", "drain deadline", "error"};
  return kNames.at(static_cast<size_t>(event));
}

std::string_view name(EngineState state) {
  static constexpr std::array<std::string_view, kNumEngineStates> kNames = {
      "starting", "running", "paused", "suspended", "draining", "stopped", "failed"};
  return kNames.at(static_cast<size_t>(state));
}

std::string_view name(EngineInput input) {
  static constexpr std::array<std::string_view, kNumEngineInputs> kNames = {
      "started",        "submit", "pause",   "resume", "suspend",
      "update_weights", "drain",  "drained", "fault"};
  return kNames.at(static_cast<size_t>(input));
}

std::string_view refusal_reason(EngineState state, EngineInput input) {
  switch (state) {
    case EngineState::kStarting:
      return "the engine is starting; try again when it is running";
    case EngineState::kRunning:
      return input == EngineInput::kSuspend ? "the engine is running; pause it first" : "";
    case EngineState::kPaused:
      return "";
    case EngineState::kSuspended:
      return input == EngineInput::kSuspend
                 ? "the engine is suspended with other levels; resume it first"
                 : "the engine is suspended; try again when it was resumed";
    case EngineState::kDraining:
      return "the engine is draining and will stop";
    case EngineState::kStopped:
      return "the engine has stopped";
    case EngineState::kFailed:
      return "the engine has failed; restart it";
  }
  return "";
}

}  // namespace megatron
