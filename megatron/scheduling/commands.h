// Commands to the engine, their tickets, and what the engine tells of itself.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "megatron/scheduling/request.h"
#include "megatron/scheduling/state.h"

namespace megatron {

// What becomes of requests that are running or queued.
enum class PauseMode : uint8_t {
  kFinish,  // running ones are finished first; queued ones stay queued
  kKeep,    // all stay as they are, between two steps
  kAbort,   // all end with kCancelled
};

// Where the cache, or the weights, are while the engine is suspended.
enum class MemoryLevel : uint8_t {
  kKeep,     // on the device
  kOffload,  // in host memory
  kDrop,     // nowhere: prefixes are computed again, weights are read again
};

struct PauseCommand {
  PauseMode mode = PauseMode::kKeep;
};
struct ResumeCommand {};
struct SuspendCommand {
  MemoryLevel cache = MemoryLevel::kOffload;
  MemoryLevel weights = MemoryLevel::kOffload;
  bool operator==(const SuspendCommand&) const = default;
};
struct UpdateWeightsCommand {
  std::string source;   // what the model is loaded from, as for --load
  int64_t version = 0;  // above the current one
  // Keys and values that the old weights computed: true: running requests compute them again;
  // false: they go on with them. Cached prefixes go in both cases.
  bool recompute = false;
};
struct DrainCommand {
  bool abort_queued = false;  // queued requests end with kShutdown at once
};
using EngineCommand =
    std::variant<PauseCommand, ResumeCommand, SuspendCommand, UpdateWeightsCommand, DrainCommand>;

constexpr EngineInput input_of(const EngineCommand& command) {
  constexpr EngineInput kInputs[] = {EngineInput::kPause, EngineInput::kResume,
                                     EngineInput::kSuspend, EngineInput::kUpdateWeights,
                                     EngineInput::kDrain};
  return kInputs[command.index()];
}

struct CommandOutcome {
  enum class Kind : uint8_t {
    kDone,
    kRefused,   // not possible in the engine's state; nothing was tried
    kTimedOut,  // the deadline passed; the engine is in the state where it was before
    kFailed,    // a rank could not do it; the engine is where it was before, or has failed
  };
  Kind kind = Kind::kDone;
  EngineState state{};                // of the engine afterwards
  std::string message;                // empty for kDone
  int rank = -1;                      // whose fault it was; -1: of no rank
  std::vector<RequestId> unfinished;  // pause(finish), drain: those that were not finished in time
};

// The outcome of a command, later. Copies share it; thread safe.
class Ticket {
 public:
  Ticket() : shared_(std::make_shared<Shared>()) {}

  std::optional<CommandOutcome> outcome() const;  // null: not yet
  // Blocks until it is known. Not on the thread that runs the engine.
  CommandOutcome wait() const;
  // Calls `then` once: now if the outcome is known, else on the engine's thread.
  void then(std::function<void(const CommandOutcome&)> then) const;

  // For the engine, once.
  void resolve(CommandOutcome outcome) const;

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable known;
    std::optional<CommandOutcome> outcome;
    std::vector<std::function<void(const CommandOutcome&)>> then;
  };
  std::shared_ptr<Shared> shared_;
};

// Durations by powers of two from 64 us.
class DurationHistogram {
 public:
  static constexpr size_t kBuckets = 24;
  // The largest duration of bucket i; those above the last bound are in bucket kBuckets.
  static constexpr int64_t bound_ns(size_t i) { return int64_t{64'000} << i; }

  void add(int64_t ns);
  uint64_t count() const { return count_; }
  int64_t sum_ns() const { return sum_ns_; }
  const std::array<uint64_t, kBuckets + 1>& buckets() const { return buckets_; }

 private:
  std::array<uint64_t, kBuckets + 1> buckets_{};
  uint64_t count_ = 0;
  int64_t sum_ns_ = 0;
};

// A copy of the engine's counters at the end of a step. Counters only rise; choices of a request
// count each.
struct EngineStats {
  EngineState state = EngineState::kStarting;
  std::string failure;  // kFailed: the first cause, with the rank
  int64_t weights_version = 0;

  int64_t queued = 0, running = 0, preempted = 0;  // now, by state
  int64_t max_running = 0;
  int64_t blocks_free = 0, blocks_held = 0, blocks_cached = 0;  // now; their sum is the pool
  int64_t block_size = 0;

  uint64_t steps = 0;
  uint64_t submitted = 0, refused = 0;
  std::array<uint64_t, 10> finished{};  // by FinishReason
  uint64_t preemptions = 0, swapped_blocks = 0;
  uint64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
  uint64_t drafts = 0, accepted_drafts = 0;   // that were computed; of those, that stand
  uint64_t step_tokens = 0, step_budget = 0;  // sums over steps: rows planned, rows allowed

  // From submission to first scheduling; to the first token; between tokens; to the end; one step.
  DurationHistogram queue, first_token, gap, whole, step;
};

}  // namespace megatron
