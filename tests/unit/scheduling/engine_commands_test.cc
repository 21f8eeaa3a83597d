// Every command in every state of the engine, with every fault at every rank; random sequences of
// them; and callers on many threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>

#include "engine_harness.h"

namespace megatron {
namespace {

using Kind = CommandOutcome::Kind;
constexpr int kRanks = 3;
constexpr int64_t kDeadline = 20 * kMillisecond, kUndo = 50 * kMillisecond;

FakeOptions model_of_commands() {
  FakeOptions options;
  options.facts = {.vocab_size = 250,
                   .max_positions = 80,
                   .slots = 2,
                   .block_size = 8,
                   .device_blocks = 32,
                   .weights_version = 1};
  return options;
}

EngineOptions options_of_commands() { return {.step_timeout_ns = 10 * kSecond, .undo_ns = kUndo}; }

RequestSpec long_request(int32_t first) {
  RequestSpec spec;
  spec.prompt.resize(6);
  std::iota(spec.prompt.begin(), spec.prompt.end(), first);
  spec.stop.max_tokens = 60;
  return spec;
}

// One thing that happens: a request, or a command with a fault.
struct Action {
  enum class What {
    kSubmit,
    kPauseFinish,
    kPauseKeep,
    kPauseAbort,
    kResume,
    kSuspendKeep,
    kSuspendDrop,
    kUpdateKeep,
    kUpdateRecompute,
    kDrain,
    kDrainLong,  // is still draining afterwards
  };
  enum class Trouble { kNone, kRefuses, kLate, kNever, kThrows, kDies, kCommitRefuses };
  What what = What::kSubmit;
  Trouble trouble = Trouble::kNone;
  int rank = 0;
};
constexpr int kNumWhats = 11, kNumTroubles = 7;

std::vector<Action> all_actions() {
  std::vector<Action> actions;
  for (int what = 0; what < kNumWhats; ++what)
    for (int trouble = 0; trouble < kNumTroubles; ++trouble)
      for (int rank = 0; rank < kRanks; ++rank) {
        const Action action = {static_cast<Action::What>(what),
                               static_cast<Action::Trouble>(trouble), rank};
        if (action.trouble == Action::Trouble::kNone && rank > 0) continue;
        if (action.trouble == Action::Trouble::kDies && rank == 0) continue;
        if (action.what == Action::What::kSubmit && trouble != 0) continue;
        actions.push_back(action);
      }
  return actions;
}

class CommandPath {
 public:
  CommandPath() : run(model_of_commands(), options_of_commands(), kRanks) {}

  // Does it and compares with the table.
  void act(const Action& action) {
    const EngineStats before = run.engine->stats();
    if (action.what == Action::What::kSubmit) {
      const RequestSpec spec = long_request(1 + static_cast<int32_t>(run.specs.size()));
      const Admission admission = run.engine->submit(spec);
      const EngineAnswer answer = transition(before.state, EngineInput::kSubmit).answer;
      ASSERT_EQ(admission.id.has_value(), answer == EngineAnswer::kQueues);
      if (admission.id) run.accept(*admission.id, spec);
      run.ticks(2);
      return;
    }
    inject(action);
    const EngineCommand command = command_of(action);
    if (action.what == Action::What::kDrainLong) {
      run.engine->command(command, 3600 * kSecond);
      run.ticks(3);
      check_drain(action, before);
    } else {
      check_outcome(action, before, run.command(command, kDeadline));
      EXPECT_LE(run.took_ns, kDeadline + kUndo + 4 * kMillisecond);
    }
    for (const auto& runner : run.runners) {
      used_fault_ |= fault_was_set_ && !runner->fault_is_pending();
      runner->inject({});
    }
    fault_was_set_ = false;
  }

  // What the engine's further behaviour depends on.
  std::string key() const {
    const EngineStats stats = run.engine->stats();
    return cat(name(stats.state), " ", levels_, " ", stats.running > 0, stats.queued > 0, " ",
               std::min<int64_t>(run.open, 3));
  }

  // All that was left ends, and nothing is held.
  void end() {
    const EngineState state = run.state();
    if (state == EngineState::kPaused || state == EngineState::kSuspended) {
      EXPECT_EQ(run.command(ResumeCommand{}, kDeadline).kind, Kind::kDone);
    }
    if (run.failure.empty()) {
      run.finish_all();
      run.ticks(3);
      run.check_empty();
    }
    EXPECT_EQ(run.open, 0);
    run.check_outputs();
  }

  EngineHarness run;

 private:
  void inject(const Action& action) {
    using Trouble = Action::Trouble;
    const int64_t now = run.clock.now_ns();
    Fault fault;
    switch (action.trouble) {
      case Trouble::kNone:
        return;
      case Trouble::kDies:
        return run.kill(action.rank);
      case Trouble::kRefuses:
        fault = {.kind = Fault::Kind::kRefuse};
        break;
      case Trouble::kCommitRefuses:
        fault = {.kind = Fault::Kind::kRefuse, .skip = 1};
        break;
      case Trouble::kLate:
        fault = {.kind = Fault::Kind::kLate, .until_ns = now + kDeadline + kUndo / 2};
        break;
      case Trouble::kNever:
        fault = {.kind = Fault::Kind::kLate, .until_ns = INT64_MAX};
        break;
      case Trouble::kThrows:
        fault = {.kind = Fault::Kind::kThrow};
        break;
    }
    run.runners[static_cast<size_t>(action.rank)]->inject(fault);
    fault_was_set_ = true;
  }

  EngineCommand command_of(const Action& action) {
    using What = Action::What;
    switch (action.what) {
      case What::kPauseFinish:
        return PauseCommand{PauseMode::kFinish};
      case What::kPauseKeep:
        return PauseCommand{PauseMode::kKeep};
      case What::kPauseAbort:
        return PauseCommand{PauseMode::kAbort};
      case What::kResume:
        return ResumeCommand{};
      case What::kSuspendKeep:
        return SuspendCommand{MemoryLevel::kKeep, MemoryLevel::kOffload};
      case What::kSuspendDrop:
        return SuspendCommand{MemoryLevel::kDrop, MemoryLevel::kDrop};
      case What::kUpdateKeep:
      case What::kUpdateRecompute:
        return UpdateWeightsCommand{"new", run.engine->stats().weights_version + 1, true};
      default:
        return DrainCommand{};
    }
  }

  static bool reaches_runners(const Action& action, EngineState state) {
    using What = Action::What;
    const bool suspend = action.what == What::kSuspendKeep || action.what == What::kSuspendDrop;
    const bool update = action.what == What::kUpdateKeep || action.what == What::kUpdateRecompute;
    if (action.what == What::kResume) return state == EngineState::kSuspended;
    return (suspend && state == EngineState::kPaused) ||
           (update && state != EngineState::kDraining);
  }

  void check_drain(const Action& action, const EngineStats& before) {
    const bool over = before.state == EngineState::kStopped || before.state == EngineState::kFailed;
    const EngineState state = run.state();
    if (action.trouble == Action::Trouble::kDies && !over &&
        before.state != EngineState::kSuspended) {
      EXPECT_EQ(state, EngineState::kFailed);
    } else if (over) {
      EXPECT_EQ(state, before.state);
    } else {
      EXPECT_TRUE(state == EngineState::kStopped || state == EngineState::kDraining ||
                  state == EngineState::kFailed);
    }
  }

  void check_outcome(const Action& action, const EngineStats& before,
                     const CommandOutcome& outcome) {
    using Trouble = Action::Trouble;
    using What = Action::What;
    const EngineTransition& cell = transition(before.state, input_of(command_of(action)));
    const bool over = before.state == EngineState::kStopped || before.state == EngineState::kFailed;
    if (action.trouble == Trouble::kDies && !over) {
      // It is seen before the command, or while it is executed.
      if (run.state() == EngineState::kFailed) {
        EXPECT_EQ(run.failure, cat("rank ", action.rank, ": its process has ended"));
      } else {
        EXPECT_EQ(run.state(), EngineState::kStopped);
      }
      return;
    }
    EXPECT_EQ(outcome.state, run.state());
    if (cell.answer == EngineAnswer::kRefused) {
      EXPECT_EQ(outcome.kind, Kind::kRefused);
      EXPECT_EQ(run.state(), before.state);
      return;
    }
    if (cell.answer == EngineAnswer::kAlready || cell.answer == EngineAnswer::kSameLevels) {
      const bool same = cell.answer == EngineAnswer::kAlready ||
                        levels_ == (action.what == What::kSuspendDrop ? 2 : 1);
      EXPECT_EQ(outcome.kind, same ? Kind::kDone : Kind::kRefused);
      EXPECT_EQ(run.state(), before.state);
      return;
    }
    if (cell.answer == EngineAnswer::kShorterDeadline || action.what == What::kDrain) {
      EXPECT_EQ(outcome.kind, Kind::kDone);
      EXPECT_EQ(run.state(), EngineState::kStopped);
      return;
    }
    const bool troubled =
        action.trouble != Trouble::kNone && reaches_runners(action, before.state) &&
        (action.trouble != Trouble::kCommitRefuses || action.what == What::kUpdateKeep ||
         action.what == What::kUpdateRecompute);
    if (troubled) return check_troubled(action, before, outcome);
    if (action.what == What::kPauseFinish && before.running > 0) {
      EXPECT_EQ(outcome.kind, Kind::kTimedOut);
      EXPECT_EQ(outcome.unfinished.size(), static_cast<size_t>(before.running));
      EXPECT_EQ(run.state(), EngineState::kRunning);
      return;
    }
    EXPECT_EQ(outcome.kind, Kind::kDone) << outcome.message;
    EXPECT_EQ(run.state(), cell.answer == EngineAnswer::kMoves ? cell.next : before.state);
    if (action.what == What::kSuspendKeep) levels_ = 1;
    if (action.what == What::kSuspendDrop) levels_ = 2;
    if (run.state() != EngineState::kSuspended) levels_ = 0;
  }

  // The old state, or kFailed with the rank that was at fault.
  void check_troubled(const Action& action, const EngineStats& before,
                      const CommandOutcome& outcome) {
    using Trouble = Action::Trouble;
    EXPECT_EQ(outcome.rank, action.rank) << outcome.message;
    const bool fails = action.trouble == Trouble::kNever || action.trouble == Trouble::kThrows ||
                       action.trouble == Trouble::kCommitRefuses;
    if (fails) {
      EXPECT_EQ(outcome.kind, Kind::kFailed);
      EXPECT_EQ(run.state(), EngineState::kFailed);
      EXPECT_TRUE(run.failure.starts_with(cat("rank ", action.rank, ": "))) << run.failure;
      return;
    }
    EXPECT_EQ(outcome.kind, action.trouble == Trouble::kLate ? Kind::kTimedOut : Kind::kFailed);
    EXPECT_EQ(outcome.message,
              cat("rank ", action.rank,
                  action.trouble == Trouble::kLate ? " has not acknowledged at the deadline"
                                                   : ": it cannot"));
    EXPECT_EQ(run.state(), before.state);
    EXPECT_EQ(run.engine->stats().weights_version, before.weights_version);
    for (const auto& runner : run.runners) {
      EXPECT_FALSE(runner->staged());
      EXPECT_EQ(runner->version(), before.weights_version);
    }
  }

  int levels_ = 0;  // while it is suspended: 1 keep, 2 drop
  bool fault_was_set_ = false, used_fault_ = false;
};

// All paths of up to six actions, of which those that lead to the same state are continued once.
TEST(EngineCommands, EveryOneInEveryStateWithEveryFaultAtEveryRank) {
  const std::vector<Action> actions = all_actions();
  std::set<std::string> seen = {CommandPath().key()};
  std::vector<std::vector<Action>> paths = {{}};
  int walked = 0;
  for (int length = 1; length <= 6; ++length) {
    std::vector<std::vector<Action>> longer;
    for (const std::vector<Action>& path : paths)
      for (const Action& action : actions) {
        CommandPath walk;
        for (const Action& earlier : path) walk.act(earlier);
        walk.act(action);
        ++walked;
        const bool is_new = seen.insert(walk.key()).second;
        walk.end();
        ASSERT_FALSE(testing::Test::HasFailure())
            << "action " << static_cast<int>(action.what) << " trouble "
            << static_cast<int>(action.trouble) << " rank " << action.rank << " after "
            << path.size() << " others";
        if (!is_new) continue;
        longer.push_back(path);
        longer.back().push_back(action);
      }
    paths = std::move(longer);
  }
  EXPECT_GT(walked, 3000);
  std::printf("  %d paths over %zu states\n", walked, seen.size());
}

// Commands that nobody waits for, with deadlines and faults as they come.
class RandomCommands {
 public:
  explicit RandomCommands(uint32_t seed)
      : random_(seed), run_(model_of_commands(), options_of_commands(), 1 + below(kRanks)) {}

  void execute() {
    EngineState last = run_.state();
    for (int turn = 0; turn < 60; ++turn) {
      act();
      run_.tick(below(4) * kMillisecond);
      const EngineState now = run_.state();
      ASSERT_TRUE(may_follow(last, now)) << name(last) << " " << name(now);
      last = now;
    }
    for (const auto& runner : run_.runners) runner->inject({});
    run_.engine->command(ResumeCommand{}, kSecond);
    for (int turn = 0; turn < 400; ++turn) run_.tick(10 * kMillisecond);
    for (const Ticket& ticket : tickets_) ASSERT_TRUE(ticket.outcome());
    if (run_.state() == EngineState::kSuspended || run_.state() == EngineState::kPaused)
      run_.command(ResumeCommand{}, kSecond);
    if (run_.state() != EngineState::kFailed) {
      run_.finish_all();
      run_.ticks(4);
      run_.check_empty();
    }
    ASSERT_EQ(run_.open, 0);
    run_.check_outputs();
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }

  // Whether one tick may lead from one to the other, by up to three inputs.
  static bool may_follow(EngineState from, EngineState to) {
    std::set<EngineState> reached = {from};
    for (int step = 0; step < 3; ++step)
      for (const EngineState state : std::set<EngineState>(reached))
        for (size_t input = 0; input < kNumEngineInputs; ++input) {
          const EngineTransition& cell = transition(state, static_cast<EngineInput>(input));
          if (cell.answer == EngineAnswer::kMoves) reached.insert(cell.next);
        }
    return reached.contains(to);
  }

  void act() {
    const int64_t deadline = (1 + below(40)) * kMillisecond;
    switch (below(14)) {
      case 0:
      case 1:
      case 2: {
        RequestSpec spec = long_request(1 + below(5));
        spec.stop.max_tokens = 1 + below(40);
        const Admission admission = run_.engine->submit(spec);
        if (admission.id) run_.accept(*admission.id, spec);
        return;
      }
      case 3:
        return run_.engine->cancel(RequestId{static_cast<uint64_t>(below(20))});
      case 4:
      case 5:
        return give(PauseCommand{static_cast<PauseMode>(below(3))}, deadline);
      case 6:
      case 7:
        return give(ResumeCommand{}, deadline);
      case 8:
      case 9:
        return give(
            SuspendCommand{static_cast<MemoryLevel>(below(3)), static_cast<MemoryLevel>(below(3))},
            deadline);
      case 10:
        return give(UpdateWeightsCommand{"new", ++version_, true}, deadline);
      case 11:
        if (below(10) == 0) give(DrainCommand{below(2) == 0}, deadline);
        return;
      default:
        return inject();
    }
  }
  void give(EngineCommand command, int64_t deadline) {
    tickets_.push_back(run_.engine->command(std::move(command), deadline));
  }
  void inject() {
    const auto rank = static_cast<size_t>(below(static_cast<int>(run_.runners.size())));
    if (below(60) == 0 && rank > 0) return run_.kill(static_cast<int>(rank));
    Fault fault;
    fault.kind = static_cast<Fault::Kind>(below(below(10) == 0 ? 4 : 3));
    fault.until_ns = run_.clock.now_ns() + below(60) * kMillisecond;
    fault.skip = below(2);
    run_.runners[rank]->inject(fault);
  }

  std::mt19937 random_;
  EngineHarness run_;
  std::vector<Ticket> tickets_;
  int64_t version_ = 1;
};

int in_environment(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// MEGATRON_RANDOM_COMMANDS of them, from the seed MEGATRON_RANDOM_SEED on.
TEST(EngineCommands, RandomSequencesKeepTheTables) {
  const int first = in_environment("MEGATRON_RANDOM_SEED", 0);
  const int last = first + in_environment("MEGATRON_RANDOM_COMMANDS", 2000);
  for (int seed = first; seed < last; ++seed) {
    SCOPED_TRACE(cat("seed ", seed));
    RandomCommands(static_cast<uint32_t>(seed)).execute();
    if (testing::Test::HasFailure()) return;
  }
}

// Callers on several threads, an engine on another, and ranks on two more.
TEST(EngineThreads, ManyCallersMeetOneEngine) {
  const MonotonicClock clock;
  const FakeOptions model = model_of_commands();
  FakeRunner runner(model, clock);
  LocalLinks links(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 1; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      FakeRunner other(model, clock);
      LocalLink link(links, rank);
      follow(link, other, clock, {});
    });
  Engine engine(runner, &links, nullptr, clock, {.check_invariants = true});
  std::map<RequestId, int> ends;
  std::thread owner([&] {
    while (engine.step(kMillisecond).state != EngineState::kStopped)
      for (const Event& event : engine.take_events()) ends[event.request] += event.finish ? 1 : 0;
    for (const Event& event : engine.take_events()) ends[event.request] += event.finish ? 1 : 0;
  });
  while (engine.stats().state == EngineState::kStarting) std::this_thread::yield();
  constexpr int kCallers = 4, kCalls = 250;
  std::mutex mutex;
  std::vector<RequestId> taken;
  std::atomic<int64_t> version = 1;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&, caller] {
      std::mt19937 random(static_cast<uint32_t>(caller));
      for (int call = 0; call < kCalls; ++call) {
        RequestSpec spec = long_request(1 + caller);
        spec.stop.max_tokens = 1 + random() % 20;
        const Admission admission = engine.submit(spec);
        if (admission.id) {
          const std::lock_guard lock(mutex);
          taken.push_back(*admission.id);
        }
        if (random() % 8 == 0 && admission.id) engine.cancel(*admission.id);
        if (caller > 0 || random() % 10 > 0) continue;
        engine.command(PauseCommand{PauseMode::kFinish}, kSecond).wait();
        engine.command(SuspendCommand{}, kSecond).wait();
        engine.command(ResumeCommand{}, kSecond).wait();
        engine.command(UpdateWeightsCommand{"new", ++version, true}, kSecond).wait();
        engine.command(ResumeCommand{}, kSecond);
        engine.stats();
      }
    });
  for (std::thread& caller : callers) caller.join();
  const CommandOutcome drained = engine.command(DrainCommand{}, 60 * kSecond).wait();
  EXPECT_EQ(drained.kind, Kind::kDone) << drained.message;
  EXPECT_TRUE(drained.unfinished.empty());
  owner.join();
  for (std::thread& rank : ranks) rank.join();
  for (const RequestId id : taken) EXPECT_EQ(ends[id], 1);
  EXPECT_GT(taken.size(), 100u);
  EXPECT_EQ(engine.stats().weights_version, version.load());
}

}  // namespace
}  // namespace megatron
