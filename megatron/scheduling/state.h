// The states of a request and of the engine, and what each event does in each of them, as tables.
// docs/design/engine_states.md shows the same tables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace megatron {

// Of one choice of a request.
enum class RequestState : uint8_t {
  kQueued,     // holds nothing
  kPrefill,    // holds blocks; some of its known tokens are not in the cache yet
  kDecode,     // all known tokens but the last are in the cache
  kPreempted,  // was running; its blocks are on the host, or to be computed again
  kFinished,
};
constexpr size_t kNumRequestStates = 5;

enum class RequestEvent : uint8_t {
  kScheduled,      // the scheduler gives it blocks
  kChunkDone,      // a step with some of its known tokens was planned
  kToken,          // a generated token was read
  kOutOfBlocks,    // others need its blocks, the cache is dropped, or the weights change
  kCancel,         // by the client
  kDeadline,       // of the request
  kPauseAbort,     // pause(abort)
  kDrainDeadline,  // the engine stops
  kError,          // non-finite logits, a grammar without continuation, a failed rank
};
constexpr size_t kNumRequestEvents = 9;

// One cell: where the event may lead.
struct RequestTransition {
  uint8_t next = 0;      // set of states, one bit each; empty and not ignored: cannot happen
  bool ignored = false;  // nothing changes; a token is dropped
  // Blocks are released when the last step that reads or writes them has ended on the device.
  bool after_step = false;

  constexpr bool possible() const { return next != 0 || ignored; }
  constexpr bool leads_to(RequestState state) const {
    return (next >> static_cast<int>(state) & 1) != 0;
  }
};

namespace detail {
constexpr RequestTransition to(std::initializer_list<RequestState> states,
                               bool after_step = false) {
  RequestTransition cell;
  for (const RequestState state : states)
    cell.next = static_cast<uint8_t>(cell.next | 1 << static_cast<int>(state));
  cell.after_step = after_step;
  return cell;
}
constexpr RequestTransition kNever{};
constexpr RequestTransition kIgnored{0, true, false};
constexpr RequestTransition kEnds = to({RequestState::kFinished});
constexpr RequestTransition kEndsAfterStep = to({RequestState::kFinished}, true);
}  // namespace detail

// clang-format off
// By state, then by event.
constexpr std::array<std::array<RequestTransition, kNumRequestEvents>, kNumRequestStates>
    kRequestTable = {{
        {detail::to({RequestState::kPrefill}), detail::kNever, detail::kNever, detail::kNever,
         detail::kEnds, detail::kEnds, detail::kEnds, detail::kEnds, detail::kEnds},
        {detail::kNever, detail::to({RequestState::kPrefill, RequestState::kDecode}),
         detail::kNever,
         detail::to({RequestState::kPreempted}, true),
         detail::kEndsAfterStep, detail::kEndsAfterStep, detail::kEndsAfterStep,
         detail::kEndsAfterStep, detail::kEndsAfterStep},
        {detail::kNever, detail::kNever,
         detail::to({RequestState::kDecode, RequestState::kFinished}),
         detail::to({RequestState::kPreempted}, true),
         detail::kEndsAfterStep, detail::kEndsAfterStep, detail::kEndsAfterStep,
         detail::kEndsAfterStep, detail::kEndsAfterStep},
        {detail::to({RequestState::kPrefill, RequestState::kDecode}), detail::kNever,
         detail::to({RequestState::kPreempted, RequestState::kFinished}), detail::kNever,
         detail::kEnds, detail::kEnds, detail::kEnds, detail::kEnds, detail::kEnds},
        {detail::kNever, detail::kNever, detail::kIgnored, detail::kNever,
         detail::kIgnored, detail::kIgnored, detail::kIgnored, detail::kIgnored, detail::kIgnored},
    }};
// clang-format on

constexpr const RequestTransition& transition(RequestState state, RequestEvent event) {
  return kRequestTable[static_cast<size_t>(state)][static_cast<size_t>(event)];
}

enum class EngineState : uint8_t {
  kStarting,  // loads weights
  kRunning,
  kPaused,     // takes requests, runs no step
  kSuspended,  // as paused, takes none; cache and weights may be on the host or dropped
  kDraining,   // finishes what it has, takes none
  kStopped,
  kFailed,  // left by a restart alone
};
constexpr size_t kNumEngineStates = 7;

enum class EngineInput : uint8_t {
  kStarted,  // weights are loaded and every rank is ready
  kSubmit,
  kPause,
  kResume,
  kSuspend,
  kUpdateWeights,
  kDrain,
  kDrained,  // nothing is left to finish, or the deadline has passed
  kFault,    // a device or a rank failed
};
constexpr size_t kNumEngineInputs = 9;

enum class EngineAnswer : uint8_t {
  kNever,            // cannot happen
  kMoves,            // to `next`, once every rank has acknowledged
  kInPlace,          // done by every rank; the state stays
  kAlready,          // nothing to do: the engine is where the command leads
  kSameLevels,       // kAlready if the levels are those of now, else kRefused
  kShorterDeadline,  // kAlready; of two deadlines the earlier holds
  kRefused,
  kQueues,       // a request waits in the queue
  kUnavailable,  // a request is refused, with Refusal::Kind::kUnavailable
};

struct EngineTransition {
  EngineAnswer answer = EngineAnswer::kNever;
  EngineState next{};  // kMoves
};

namespace detail {
constexpr EngineTransition moves(EngineState next) { return {EngineAnswer::kMoves, next}; }
constexpr EngineTransition answers(EngineAnswer answer) { return {answer, EngineState{}}; }
constexpr EngineTransition kNo = answers(EngineAnswer::kRefused);
constexpr EngineTransition kAgain = answers(EngineAnswer::kAlready);
constexpr EngineTransition kElsewhere = answers(EngineAnswer::kUnavailable);
constexpr EngineTransition kWaits = answers(EngineAnswer::kQueues);
constexpr EngineTransition kHere = answers(EngineAnswer::kInPlace);
constexpr EngineTransition kCannot = answers(EngineAnswer::kNever);
constexpr EngineTransition kFails = moves(EngineState::kFailed);
}  // namespace detail

// clang-format off
// By state, then by input: started, submit, pause, resume, suspend, update_weights, drain, drained,
// fault.
constexpr std::array<std::array<EngineTransition, kNumEngineInputs>, kNumEngineStates>
    kEngineTable = {{
        // starting
        {detail::moves(EngineState::kRunning), detail::kElsewhere, detail::kNo, detail::kNo,
         detail::kNo, detail::kNo, detail::moves(EngineState::kStopped), detail::kCannot,
         detail::kFails},
        // running
        {detail::kCannot, detail::kWaits, detail::moves(EngineState::kPaused), detail::kAgain,
         detail::kNo, detail::kHere, detail::moves(EngineState::kDraining), detail::kCannot,
         detail::kFails},
        // paused
        {detail::kCannot, detail::kWaits, detail::kAgain, detail::moves(EngineState::kRunning),
         detail::moves(EngineState::kSuspended), detail::kHere,
         detail::moves(EngineState::kDraining), detail::kCannot, detail::kFails},
        // suspended
        {detail::kCannot, detail::kElsewhere, detail::kAgain, detail::moves(EngineState::kRunning),
         detail::answers(EngineAnswer::kSameLevels), detail::kHere,
         detail::moves(EngineState::kStopped), detail::kCannot, detail::kFails},
        // draining
        {detail::kCannot, detail::kElsewhere, detail::kNo, detail::kNo, detail::kNo, detail::kNo,
         detail::answers(EngineAnswer::kShorterDeadline), detail::moves(EngineState::kStopped),
         detail::kFails},
        // stopped
        {detail::kCannot, detail::kElsewhere, detail::kNo, detail::kNo, detail::kNo, detail::kNo,
         detail::kAgain, detail::kCannot, detail::kAgain},
        // failed
        {detail::kCannot, detail::kElsewhere, detail::kNo, detail::kNo, detail::kNo, detail::kNo,
         detail::kAgain, detail::kCannot, detail::kAgain},
    }};
// clang-format on

constexpr const EngineTransition& transition(EngineState state, EngineInput input) {
  return kEngineTable[static_cast<size_t>(state)][static_cast<size_t>(input)];
}

// "queued", "prefill", ...; "scheduled", "chunk done", ...
std::string_view name(RequestState state);
std::string_view name(RequestEvent event);
std::string_view name(EngineState state);
std::string_view name(EngineInput input);

// What a refused or unavailable command is told: why, and what to do; one line.
std::string_view refusal_reason(EngineState state, EngineInput input);

}  // namespace megatron
