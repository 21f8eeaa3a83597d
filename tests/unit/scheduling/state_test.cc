#include "megatron/scheduling/state.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "megatron/scheduling/commands.h"

namespace megatron {
namespace {

std::string read_page() {
  std::ifstream file(MEGATRON_SOURCE_DIR "/docs/design/engine_states.md");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string text_of(const RequestTransition& cell) {
  if (cell.ignored) return "ignored";
  std::string text;
  for (size_t i = 0; i < kNumRequestStates; ++i) {
    const auto state = static_cast<RequestState>(i);
    if (!cell.leads_to(state)) continue;
    text += (text.empty() ? "" : ", ") + std::string(name(state));
  }
  return text.empty() ? "-" : text + (cell.after_step ? "*" : "");
}

std::string text_of(const EngineTransition& cell) {
  switch (cell.answer) {
    case EngineAnswer::kNever:
      return "-";
    case EngineAnswer::kMoves:
      return std::string(name(cell.next));
    case EngineAnswer::kInPlace:
      return "in place";
    case EngineAnswer::kAlready:
      return "already";
    case EngineAnswer::kSameLevels:
      return "same levels";
    case EngineAnswer::kShorterDeadline:
      return "shorter deadline";
    case EngineAnswer::kRefused:
      return "refused";
    case EngineAnswer::kQueues:
      return "queues";
    case EngineAnswer::kUnavailable:
      return "unavailable";
  }
  return "";
}

// The table as lines of a page.
template <class State, class Event>
std::string lines_of(size_t states, size_t events) {
  std::string text = "| state |";
  for (size_t e = 0; e < events; ++e) text += " " + std::string(name(static_cast<Event>(e))) + " |";
  text += "\n| --- |";
  for (size_t e = 0; e < events; ++e) text += " --- |";
  text += "\n";
  for (size_t s = 0; s < states; ++s) {
    text += "| " + std::string(name(static_cast<State>(s))) + " |";
    for (size_t e = 0; e < events; ++e)
      text += " " + text_of(transition(static_cast<State>(s), static_cast<Event>(e))) + " |";
    text += "\n";
  }
  return text;
}

TEST(EngineStates, ThePageShowsTheTables) {
  const std::string page = read_page();
  const std::string request =
      lines_of<RequestState, RequestEvent>(kNumRequestStates, kNumRequestEvents);
  const std::string engine = lines_of<EngineState, EngineInput>(kNumEngineStates, kNumEngineInputs);
  EXPECT_NE(page.find("\n" + request + "\n"), std::string::npos) << request;
  EXPECT_NE(page.find("\n" + engine + "\n"), std::string::npos) << engine;
}

// Whatever happened before, an end can be forced, and nothing leads out of the end.
TEST(EngineStates, EveryRequestCanEndAndStaysEnded) {
  for (size_t s = 0; s < kNumRequestStates; ++s)
    for (const RequestEvent event :
         {RequestEvent::kCancel, RequestEvent::kDeadline, RequestEvent::kPauseAbort,
          RequestEvent::kDrainDeadline, RequestEvent::kError}) {
      const auto state = static_cast<RequestState>(s);
      const RequestTransition& cell = transition(state, event);
      EXPECT_TRUE(state == RequestState::kFinished ? cell.ignored
                                                   : cell.leads_to(RequestState::kFinished));
    }
  for (size_t e = 0; e < kNumRequestEvents; ++e)
    EXPECT_EQ(transition(RequestState::kFinished, static_cast<RequestEvent>(e)).next, 0);
  // Blocks of what is running may be in use by a step in flight; others have none on the device.
  for (size_t s = 0; s < kNumRequestStates; ++s)
    for (size_t e = 0; e < kNumRequestEvents; ++e) {
      const auto state = static_cast<RequestState>(s);
      const RequestTransition& cell = transition(state, static_cast<RequestEvent>(e));
      const bool running = state == RequestState::kPrefill || state == RequestState::kDecode;
      const bool leaves = cell.leads_to(RequestState::kPreempted) ||
                          (cell.leads_to(RequestState::kFinished) &&
                           static_cast<RequestEvent>(e) != RequestEvent::kToken);
      EXPECT_EQ(cell.after_step, running && leaves) << name(state) << " " << e;
    }
}

// Walks all paths of inputs from the start and counts what can be reached.
TEST(EngineStates, EveryStateIsReachedAndNoneButTheLastTwoIsForever) {
  std::set<EngineState> reached = {EngineState::kStarting};
  for (size_t round = 0; round < kNumEngineStates; ++round)
    for (const EngineState from : std::set<EngineState>(reached))
      for (size_t i = 0; i < kNumEngineInputs; ++i) {
        const EngineTransition& cell = transition(from, static_cast<EngineInput>(i));
        if (cell.answer == EngineAnswer::kMoves) {
          EXPECT_NE(cell.next, from);
          reached.insert(cell.next);
        }
      }
  EXPECT_EQ(reached.size(), kNumEngineStates);
  for (size_t s = 0; s < kNumEngineStates; ++s) {
    const auto state = static_cast<EngineState>(s);
    bool left = false;
    for (size_t i = 0; i < kNumEngineInputs; ++i)
      left |= transition(state, static_cast<EngineInput>(i)).answer == EngineAnswer::kMoves;
    EXPECT_EQ(left, state != EngineState::kStopped && state != EngineState::kFailed);
    if (left) {
      EXPECT_EQ(transition(state, EngineInput::kFault).next, EngineState::kFailed);
    }
  }
}

TEST(EngineStates, EveryRefusalSaysWhy) {
  for (size_t s = 0; s < kNumEngineStates; ++s)
    for (size_t i = 0; i < kNumEngineInputs; ++i) {
      const auto state = static_cast<EngineState>(s);
      const auto input = static_cast<EngineInput>(i);
      const EngineAnswer answer = transition(state, input).answer;
      if (answer == EngineAnswer::kRefused || answer == EngineAnswer::kUnavailable ||
          answer == EngineAnswer::kSameLevels) {
        EXPECT_FALSE(refusal_reason(state, input).empty()) << name(state) << " " << name(input);
      }
    }
  EXPECT_EQ(refusal_reason(EngineState::kRunning, EngineInput::kSuspend),
            "the engine is running; pause it first");
}

TEST(EngineStates, CommandsAreInputs) {
  EXPECT_EQ(input_of(PauseCommand{}), EngineInput::kPause);
  EXPECT_EQ(input_of(ResumeCommand{}), EngineInput::kResume);
  EXPECT_EQ(input_of(SuspendCommand{}), EngineInput::kSuspend);
  EXPECT_EQ(input_of(UpdateWeightsCommand{}), EngineInput::kUpdateWeights);
  EXPECT_EQ(input_of(DrainCommand{}), EngineInput::kDrain);
}

TEST(Tickets, TellTheirOutcomeToAllWhoAsk) {
  const Ticket ticket;
  int calls = 0;
  ticket.then([&](const CommandOutcome& outcome) { calls += outcome.message == "x" ? 1 : 100; });
  EXPECT_FALSE(ticket.outcome());
  EXPECT_EQ(calls, 0);
  ticket.resolve({.kind = CommandOutcome::Kind::kFailed, .message = "x", .rank = 3});
  ticket.then([&](const CommandOutcome& outcome) { calls += outcome.message == "x" ? 1 : 100; });
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(ticket.wait().rank, 3);
  EXPECT_EQ(ticket.outcome()->kind, CommandOutcome::Kind::kFailed);
}

TEST(DurationHistograms, CountEachDurationOnceBelowItsBound) {
  DurationHistogram histogram;
  const auto bucket = [&](int64_t ns) {
    const auto before = histogram.buckets();
    histogram.add(ns);
    for (size_t i = 0; i < before.size(); ++i)
      if (histogram.buckets()[i] != before[i]) return i;
    return before.size();
  };
  EXPECT_EQ(bucket(0), 0u);
  for (size_t i = 0; i < DurationHistogram::kBuckets; ++i) {
    EXPECT_EQ(bucket(DurationHistogram::bound_ns(i)), i);
    EXPECT_EQ(bucket(DurationHistogram::bound_ns(i) + 1), i + 1);
  }
  EXPECT_EQ(histogram.count(), 1 + 2 * DurationHistogram::kBuckets);
}

}  // namespace
}  // namespace megatron
