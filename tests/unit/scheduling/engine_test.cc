#include "megatron/inference/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "engine_harness.h"
#include "toy_grammar.h"

namespace megatron {
namespace {

FakeOptions tiny_model() {
  FakeOptions options;
  options.facts = {.vocab_size = 250,
                   .max_positions = 200,
                   .slots = 4,
                   .block_size = 4,
                   .device_blocks = 64,
                   .weights_version = 1};
  return options;
}

using Kind = CommandOutcome::Kind;

TEST(Engines, ServeManyRequestsAtOnce) {
  for (const int ranks : {1, 3}) {
    EngineHarness run(tiny_model(), {}, ranks);
    for (int32_t i = 0; i < 12; ++i) run.submit(counted_request(3 + i, 20 - i, 10 * i + 1));
    run.finish_all();
    run.check_outputs();
    run.ticks(2);
    run.check_empty();
    EXPECT_EQ(run.engine->stats().finished[static_cast<size_t>(FinishReason::kLength)], 12u);
  }
}

// While a step runs, the host reads the tokens of the one before.
TEST(Engines, LaunchAStepBeforeTheLastOneIsRead) {
  EngineHarness run(tiny_model());
  run.submit(counted_request(3, 10));
  run.tick();
  for (int64_t i = 2; i <= 10; ++i) {
    run.tick();
    EXPECT_EQ(run.runners[0]->launched(), i);
    EXPECT_EQ(static_cast<int64_t>(run.received.begin()->second.tokens.size()), i - 1);
  }
  run.finish_all();
  // A text whose end is known before costs no step more.
  EXPECT_EQ(run.runners[0]->launched(), 10);
  run.check_outputs();
}

// A runner whose launches return after the step is read before the next step is planned, so that
// nothing is computed behind the end of a text.
TEST(Engines, ComputeNothingBehindAnEndWhereLaunchesWait) {
  for (const bool waits : {false, true}) {
    FakeOptions model = tiny_model();
    model.facts.launch_waits = waits;
    EngineHarness whole(model);
    const RequestId text = whole.submit(counted_request(4, 9));
    whole.finish_all();
    RequestSpec spec = counted_request(4, 9);
    spec.stop.stop_tokens = {whole.of(text).tokens[5].id};
    EngineHarness run(model);
    const RequestId ended = run.submit(spec);
    run.finish_all();
    EXPECT_EQ(run.of(ended).finish->reason, FinishReason::kStopToken);
    const auto tokens = static_cast<int64_t>(run.of(ended).tokens.size());
    EXPECT_EQ(run.runners[0]->launched(), tokens + (waits ? 0 : 1));
  }
}

RequestSpec ask_under(std::shared_ptr<const TokenGrammar> grammar, int64_t output) {
  RequestSpec spec = counted_request(4, output);
  spec.grammar = std::move(grammar);
  return spec;
}

TEST(Engines, TextsFollowTheirGrammars) {
  for (const int32_t latency : {1, 3}) {
    FakeOptions model = tiny_model();
    model.facts.draw_latency = latency;
    model.facts.device_blocks = 12;  // some are preempted and computed again
    EngineHarness run(model, {}, 2);
    std::vector<RequestId> ids;
    for (int32_t i = 0; i < 6; ++i) {
      RequestSpec spec = ask_under(std::make_shared<ToyGrammar>(8 + i), 30);
      spec.sampling.seed = static_cast<uint64_t>(i);
      ids.push_back(run.submit(spec));
      run.submit(counted_request(5, 20, 10 * i + 1));  // one without beside it
    }
    run.finish_all();
    run.check_empty();
    EXPECT_GT(run.engine->stats().preemptions, 0u);
    for (size_t i = 0; i < ids.size(); ++i) {
      const Received& got = run.received.at({ids[i], 0});
      ASSERT_EQ(got.tokens.size(), 9 + i);
      int32_t sum = 0;
      for (const GeneratedToken& token : std::span(got.tokens).first(8 + i)) {
        EXPECT_EQ(token.id % 3, sum % 3);
        sum += token.id;
      }
      EXPECT_EQ(got.tokens.back().id, kToyEnd);
      EXPECT_EQ(got.finish->reason, FinishReason::kEndToken)
          << "of the grammar, not of the request";
    }
  }
}

TEST(Engines, GrammarsThatFailEndTheirRequestsAlone) {
  EngineHarness run(tiny_model(), {}, 2);
  const auto submit = [&](auto... arguments) {
    return run.submit(ask_under(std::make_shared<ToyGrammar>(arguments...), 30));
  };
  const RequestId dead_at_once = submit(10, 0), dead = submit(10, 3),
                  broken_at_once = submit(10, 99, 0), broken = submit(10, 99, 5), good = submit(2);
  RequestSpec early = ask_under(std::make_shared<ToyGrammar>(2), 30);
  early.stop.end_tokens = {kToyEnd};
  early.stop.min_tokens = 6;
  const RequestId no_end = run.submit(early);
  run.finish_all();
  run.check_empty();
  const auto expect = [&](RequestId id, size_t tokens, const std::string& message) {
    const Received& got = run.received.at({id, 0});
    EXPECT_EQ(got.tokens.size(), tokens) << message;
    EXPECT_EQ(got.finish->reason, FinishReason::kGrammar);
    EXPECT_EQ(got.finish->message, message);
  };
  const std::string none = "no token that may be drawn continues the grammar";
  expect(dead_at_once, 0, none);
  expect(dead, 3, none);
  expect(broken_at_once, 0, "the matcher is broken");
  expect(broken, 5, "the matcher is broken");
  expect(no_end, 2, none);
  EXPECT_EQ(run.received.at({good, 0}).finish->reason, FinishReason::kEndToken);
  EXPECT_EQ(run.state(), EngineState::kRunning);
}

TEST(Engines, TextsEndByEveryReason) {
  const auto tokenizer = byte_tokenizer();
  EngineHarness run(tiny_model(), {}, 1, tokenizer.get());
  const AloneOutput alone = run_alone(tiny_model(), counted_request(5, 30), 0);
  RequestSpec end = counted_request(5, 30), token = counted_request(5, 30),
              text = counted_request(5, 30), last = counted_request(5, 30);
  end.stop.end_tokens = {249, alone.ids[7]};
  token.stop.stop_tokens = {alone.ids[9]};
  text.stop.stop_texts = {tokenizer->decode(std::vector<int32_t>{alone.ids[4]})};
  last.stop.max_tokens = 8;
  last.stop.end_tokens = {alone.ids[7]};
  const RequestId ids[] = {run.submit(end), run.submit(token), run.submit(text), run.submit(last)};
  run.finish_all();
  run.check_outputs();
  EXPECT_EQ(run.of(ids[0]).finish->reason, FinishReason::kEndToken);
  EXPECT_EQ(run.of(ids[0]).finish->stop_token, alone.ids[7]);
  EXPECT_EQ(run.of(ids[1]).finish->reason, FinishReason::kStopToken);
  EXPECT_EQ(run.of(ids[2]).finish->reason, FinishReason::kStopText);
  EXPECT_EQ(run.of(ids[2]).finish->stop_text, text.stop.stop_texts[0]);
  EXPECT_EQ(run.of(ids[3]).finish->reason, FinishReason::kEndToken);
}

TEST(Engines, MinTokensAndLogProbabilities) {
  EngineHarness run(tiny_model());
  RequestSpec spec = counted_request(9, 20);
  const AloneOutput alone = run_alone(tiny_model(), spec, 0);
  spec.stop.end_tokens = {alone.ids[2]};
  spec.stop.min_tokens = 6;
  spec.log_probabilities = {.output_top = 3, .prompt_top = 2, .prompt_from = 1};
  const RequestId id = run.submit(spec);
  RequestSpec score = spec;
  score.stop.max_tokens = score.stop.min_tokens = 0;
  const RequestId scored = run.submit(score);
  run.finish_all();
  run.check_outputs();
  EXPECT_GE(run.of(id).tokens.size(), 6u);
  EXPECT_EQ(run.of(id).prompt.size(), 8u);
  EXPECT_EQ(run.of(scored).prompt, run.of(id).prompt);
  EXPECT_TRUE(run.of(scored).tokens.empty());
}

TEST(Engines, NonFiniteLogitsFailTheirRequestAlone) {
  EngineHarness run(tiny_model());
  RequestSpec bad = counted_request(5, 20);
  bad.sampling.forbidden = {kBreaksLogits};
  const RequestId failed = run.submit(bad);
  const RequestId good = run.submit(counted_request(5, 20, 30));
  run.finish_all();
  run.check_outputs();
  EXPECT_EQ(run.of(failed).finish->reason, FinishReason::kNonFinite);
  EXPECT_EQ(run.of(failed).finish->message,
            "the model's logits are not finite at position 8; the weights may be damaged");
  EXPECT_EQ(run.of(good).finish->reason, FinishReason::kLength);
}

TEST(Engines, RefuseWhatCannotEverOrNotNowBeServed) {
  FakeOptions model = tiny_model();
  model.facts.device_blocks = 10;
  EngineHarness run(model, {.scheduler = {.max_waiting = 2}});
  const auto refusal = [&](const RequestSpec& spec) {
    const Admission admission = run.engine->submit(spec);
    EXPECT_NE(admission.id.has_value(), admission.refusal.has_value());
    if (admission.id) run.accept(*admission.id, spec);
    return admission.refusal;
  };
  EXPECT_EQ(refusal(counted_request(20, 21))->member, "max_tokens");
  EXPECT_EQ(refusal(counted_request(20, 20)), std::nullopt);
  RequestSpec text = counted_request(5, 5);
  text.stop.stop_texts = {"a"};
  EXPECT_EQ(refusal(text)->message, "stop texts need a tokenizer");
  EXPECT_EQ(refusal(counted_request(5, 5)), std::nullopt);
  const auto full = refusal(counted_request(5, 5));
  ASSERT_TRUE(full);
  EXPECT_EQ(full->kind, Refusal::Kind::kQueueFull);
  EXPECT_GE(full->retry_after_ns, kSecond);
  EXPECT_EQ(full->message, "2 requests are waiting, of 2 at most");
  run.finish_all();
  EXPECT_EQ(refusal(counted_request(5, 5)), std::nullopt);
  run.finish_all();
  const EngineStats stats = run.engine->stats();
  EXPECT_EQ(stats.submitted, 6u);
  EXPECT_EQ(stats.refused, 3u);
}

// Many times as many requests as can run, one after another (and once more than they are).
TEST(Engines, TakeOneRequestMoreThanTheyRunAThousandTimes) {
  EngineHarness run(tiny_model());
  for (int round = 0; round < 1000; ++round) {
    for (int32_t i = 0; i < 5; ++i) run.submit(counted_request(2, 2, i + 1));
    run.finish_all(100);
  }
  run.ticks(2);
  run.check_empty();
  EXPECT_EQ(run.received.size(), 5000u);
}

TEST(Engines, CancelInEveryStateAndPhase) {
  FakeOptions model = tiny_model();
  model.facts.device_blocks = 12;
  model.facts.max_positions = 48;
  model.facts.host_blocks = 20;
  for (int ticks = 0; ticks < 60; ++ticks) {
    EngineHarness run(model, {.scheduler = {.max_step_tokens = 6, .swap_block_tokens = 0.1}});
    std::vector<RequestId> ids;
    for (int32_t i = 0; i < 7; ++i) ids.push_back(run.submit(counted_request(9, 25, 30 * i + 1)));
    run.ticks(ticks);
    for (size_t i = 0; i < ids.size(); i += 2) run.engine->cancel(ids[i]);
    run.finish_all();
    run.check_outputs();
    run.ticks(3);
    run.check_empty();
    for (const RequestId id : ids) run.engine->cancel(id);  // has no effect
    run.ticks(2);
  }
}

TEST(Engines, DeadlinesHoldToTheMillisecondWhateverTheUptime) {
  for (const int64_t start : {int64_t{0}, int64_t{1} << 53, (int64_t{1} << 62) + 12345}) {
    EngineHarness run(tiny_model(), {}, 1, nullptr, start);
    RequestSpec spec = counted_request(5, 150);
    spec.timeout_ns = 40 * kMillisecond;
    const RequestId running = run.submit(spec);
    for (int32_t i = 0; i < 4; ++i) run.submit(counted_request(5, 60, i + 2));
    const RequestId queued = run.submit(spec);
    run.finish_all();
    for (const RequestId id : {running, queued}) {
      EXPECT_EQ(run.of(id).finish->reason, FinishReason::kDeadline);
      EXPECT_EQ(run.of(id).finish->total_ns, 40 * kMillisecond);
    }
    EXPECT_EQ(run.of(queued).finish->queued_ns, -1);
    run.check_outputs();
  }
}

// Gaps of a microsecond at an uptime of years, and durations that sum to the whole.
TEST(Engines, TimesAreExactIntegers) {
  EngineHarness run(tiny_model(), {}, 1, nullptr, (int64_t{1} << 61) + 1);
  const RequestId id = run.submit(counted_request(3, 50));
  while (run.open > 0) run.tick(1000);
  const EngineStats stats = run.engine->stats();
  const Finish& finish = *run.of(id).finish;
  EXPECT_EQ(stats.gap.count(), 49u);
  EXPECT_EQ(stats.gap.sum_ns(), 49 * 1000);
  EXPECT_EQ(finish.first_token_ns + stats.gap.sum_ns(), finish.total_ns);
  EXPECT_EQ(stats.whole.sum_ns(), finish.total_ns);
  EXPECT_EQ(stats.first_token.sum_ns(), finish.first_token_ns);
}

TEST(Engines, CountersAreSumsOverEvents) {
  EngineHarness run(tiny_model());
  for (int round = 0; round < 3; ++round) {
    for (int32_t i = 0; i < 5; ++i) {
      RequestSpec spec = counted_request(9, 7, 1 + i % 2);
      spec.choices = 1 + i % 3;
      run.submit(spec);
    }
    run.finish_all();
  }
  uint64_t prompt = 0, cached = 0, output = 0;
  for (const auto& [key, choice] : run.received) {
    prompt += static_cast<uint64_t>(choice.finish->usage.prompt_tokens);
    cached += static_cast<uint64_t>(choice.finish->usage.cached_tokens);
    output += choice.tokens.size();
  }
  const EngineStats stats = run.engine->stats();
  EXPECT_EQ(stats.prompt_tokens, prompt);
  EXPECT_EQ(stats.cached_tokens, cached);
  EXPECT_EQ(stats.output_tokens, output);
  EXPECT_GT(cached, 0u);
}

TEST(Engines, PauseKeepsFinishesOrAborts) {
  for (const int ranks : {1, 2}) {
    EngineHarness run(tiny_model(), {}, ranks);
    // They end one after the other, so that there is room while the last of them are finished.
    for (int32_t i = 0; i < 6; ++i) run.submit(counted_request(5, 20 + 4 * i, 7 * i + 1));
    run.ticks(5);
    EXPECT_EQ(run.command(PauseCommand{PauseMode::kKeep}).kind, Kind::kDone);
    EXPECT_EQ(run.state(), EngineState::kPaused);
    const int64_t launched = run.runners[0]->launched();
    const RequestId later = run.submit(counted_request(4, 30));
    run.ticks(10);
    EXPECT_EQ(run.runners[0]->launched(), launched);
    EXPECT_EQ(run.command(ResumeCommand{}).kind, Kind::kDone);
    run.ticks(3);
    EXPECT_EQ(run.command(PauseCommand{PauseMode::kFinish}).kind, Kind::kDone);
    EXPECT_EQ(run.engine->stats().running, 0);
    EXPECT_EQ(run.engine->stats().queued, 3);  // stay
    EXPECT_EQ(run.command(ResumeCommand{}).kind, Kind::kDone);
    run.ticks(3);
    EXPECT_EQ(run.command(PauseCommand{PauseMode::kAbort}).kind, Kind::kDone);
    EXPECT_EQ(run.open, 0);
    EXPECT_EQ(run.of(later).finish->reason, FinishReason::kCancelled);
    run.check_outputs();
  }
}

// What is not finished in time is told by its number, and the engine serves on.
TEST(Engines, APauseThatIsLateNamesTheUnfinished) {
  EngineHarness run(tiny_model());
  const RequestId endless = run.submit(counted_request(5, 190));
  run.ticks(3);
  const CommandOutcome outcome = run.command(PauseCommand{PauseMode::kFinish}, 20 * kMillisecond);
  EXPECT_EQ(outcome.kind, Kind::kTimedOut);
  EXPECT_EQ(outcome.unfinished, std::vector<RequestId>{endless});
  EXPECT_LE(run.took_ns, 21 * kMillisecond);
  EXPECT_EQ(run.state(), EngineState::kRunning);
  const RequestId next = run.submit(counted_request(5, 3, 40));
  run.finish_all();
  run.check_outputs();
  EXPECT_EQ(run.of(next).finish->reason, FinishReason::kLength);
}

TEST(Engines, SuspensionGivesMemoryBackAndChangesNoToken) {
  for (const int ranks : {1, 2})
    for (const MemoryLevel cache : {MemoryLevel::kKeep, MemoryLevel::kOffload, MemoryLevel::kDrop})
      for (const MemoryLevel weights :
           {MemoryLevel::kKeep, MemoryLevel::kOffload, MemoryLevel::kDrop}) {
        EngineHarness run(tiny_model(), {}, ranks);
        EXPECT_EQ(run.command(SuspendCommand{cache, weights}).message,
                  "the engine is running; pause it first");
        for (int32_t i = 0; i < 6; ++i) run.submit(counted_request(5, 30, 7 * i + 1));
        run.ticks(5);
        run.command(PauseCommand{});
        EXPECT_EQ(run.command(SuspendCommand{cache, weights}).kind, Kind::kDone);
        EXPECT_EQ(run.state(), EngineState::kSuspended);
        EXPECT_EQ(run.command(SuspendCommand{cache, weights}).kind, Kind::kDone);
        const MemoryLevel other =
            cache == MemoryLevel::kKeep ? MemoryLevel::kDrop : MemoryLevel::kKeep;
        EXPECT_EQ(run.command(SuspendCommand{other, weights}).kind, Kind::kRefused);
        EXPECT_EQ(run.engine->submit(counted_request(3, 3)).refusal->kind,
                  Refusal::Kind::kUnavailable);
        EXPECT_EQ(run.command(ResumeCommand{}).kind, Kind::kDone);
        run.finish_all();
        run.check_outputs();
      }
}

TEST(Engines, EachTokenNamesTheWeightsThatGaveIt) {
  for (const bool recompute : {false, true})
    for (const bool paused : {false, true}) {
      FakeOptions model = tiny_model();
      model.keys_depend_on_weights = recompute;
      EngineHarness run(model, {}, 2);
      for (int64_t version = 2; version < 12; ++version) {
        for (int32_t i = 0; i < 3; ++i) run.submit(counted_request(5, 30, 7 * i + 1));
        run.ticks(7);
        if (paused) run.command(PauseCommand{});
        EXPECT_EQ(run.command(UpdateWeightsCommand{"new", version, recompute}).kind, Kind::kDone);
        if (paused) run.command(ResumeCommand{});
        EXPECT_EQ(run.engine->stats().weights_version, version);
        for (const auto& runner : run.runners) EXPECT_EQ(runner->version(), version);
        EXPECT_EQ(
            run.command(UpdateWeightsCommand{"old", version}).message,
            cat("version ", version, " of the weights is not above the current one, ", version));
      }
      run.finish_all();
      run.check_outputs();
      std::set<int64_t> versions;
      for (const auto& [key, choice] : run.received)
        for (const GeneratedToken& token : choice.tokens) versions.insert(token.weights_version);
      EXPECT_EQ(versions.size(), 11u);
    }
}

// No cached key of older weights is read by a request that comes after them.
TEST(Engines, NewWeightsForgetPrefixes) {
  for (const bool recompute : {false, true}) {
    EngineHarness run(tiny_model());
    run.submit(counted_request(30, 3));
    run.finish_all();
    EXPECT_EQ(run.command(UpdateWeightsCommand{"new", 2, recompute}).kind, Kind::kDone);
    const RequestId id = run.submit(counted_request(30, 3));
    run.finish_all();
    run.check_outputs();
    EXPECT_EQ(run.of(id).finish->usage.cached_tokens, 0);
  }
}

TEST(Engines, DrainFinishesWhatItHasAndTakesNothing) {
  EngineHarness run(tiny_model(), {}, 2);
  run.tick();
  for (int32_t i = 0; i < 8; ++i) run.submit(counted_request(5, 20, 7 * i + 1));
  run.ticks(3);
  const Ticket ticket = run.engine->command(DrainCommand{}, 10 * kSecond);
  run.tick();
  EXPECT_EQ(run.state(), EngineState::kDraining);
  EXPECT_EQ(run.engine->submit(counted_request(3, 3)).refusal->message,
            "the engine is draining and will stop");
  EXPECT_EQ(run.command(ResumeCommand{}).kind, Kind::kRefused);
  run.finish_all();
  run.tick();
  ASSERT_TRUE(ticket.outcome());
  EXPECT_EQ(ticket.outcome()->kind, Kind::kDone);
  EXPECT_TRUE(ticket.outcome()->unfinished.empty());
  EXPECT_EQ(run.state(), EngineState::kStopped);
  for (const auto& [key, choice] : run.received)
    EXPECT_EQ(choice.finish->reason, FinishReason::kLength);
  run.check_outputs();
}

TEST(Engines, TheShorterDeadlineOfTwoDrainsWins) {
  EngineHarness run(tiny_model());
  const RequestId running = run.submit(counted_request(5, 190));
  run.ticks(3);
  const Ticket first = run.engine->command(DrainCommand{}, 60 * kSecond);
  run.tick();
  const CommandOutcome second = run.command(DrainCommand{}, 15 * kMillisecond);
  EXPECT_EQ(second.kind, Kind::kDone);
  EXPECT_EQ(second.unfinished, std::vector<RequestId>{running});
  ASSERT_TRUE(first.outcome());
  EXPECT_EQ(run.of(running).finish->reason, FinishReason::kShutdown);
  EXPECT_EQ(run.state(), EngineState::kStopped);
  run.check_outputs();
}

TEST(Engines, DoNotWaitWithSomethingToTell) {
  constexpr int64_t kLong = 60 * kSecond;
  EngineHarness run(tiny_model());
  const auto begin = std::chrono::steady_clock::now();
  run.engine->cancel(*run.engine->submit(counted_request(5, 190)).id);
  run.engine->step(kLong);
  EXPECT_EQ(run.engine->take_events().size(), 1u);
  const Ticket drain = run.engine->command(DrainCommand{}, kLong);
  EXPECT_EQ(run.engine->step(kLong).state, EngineState::kStopped);
  EXPECT_TRUE(drain.outcome());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::nanoseconds(kLong));
}

TEST(Engines, DrainGoesAheadOfAPauseThatWaits) {
  EngineHarness run(tiny_model());
  run.submit(counted_request(5, 50));
  run.ticks(3);
  const Ticket pause = run.engine->command(PauseCommand{PauseMode::kFinish}, 600 * kSecond);
  run.ticks(3);
  EXPECT_EQ(run.command(DrainCommand{true}, 10 * kSecond).kind, Kind::kDone);
  EXPECT_EQ(pause.outcome()->message, "the engine is draining");
  run.check_outputs();
}

TEST(Engines, AFailedRankEndsAllAndIsNamed) {
  for (const bool dies : {false, true}) {
    EngineHarness run(tiny_model(), {}, 3);
    std::vector<RequestId> ids;
    for (int32_t i = 0; i < 6; ++i) ids.push_back(run.submit(counted_request(5, 50, 7 * i + 1)));
    run.ticks(5);
    const Ticket ticket = run.engine->command(PauseCommand{PauseMode::kFinish}, 60 * kSecond);
    if (dies)
      run.kill(2);
    else
      run.runners[2]->inject({.kind = Fault::Kind::kThrow, .in_step = true});
    run.ticks(4);
    const std::string cause =
        dies ? "rank 2: its process has ended" : "rank 2: the device has failed";
    EXPECT_EQ(run.failure, cause);
    EXPECT_EQ(run.state(), EngineState::kFailed);
    EXPECT_EQ(run.engine->stats().failure, cause);
    EXPECT_EQ(ticket.outcome()->kind, Kind::kFailed);
    EXPECT_EQ(ticket.outcome()->rank, 2);
    for (const RequestId id : ids) {
      EXPECT_EQ(run.of(id).finish->reason, FinishReason::kInternalError);
      EXPECT_EQ(run.of(id).finish->message, cause);
    }
    EXPECT_EQ(run.engine->submit(counted_request(3, 3)).refusal->message,
              "the engine has failed; restart it");
    EXPECT_EQ(run.command(ResumeCommand{}).kind, Kind::kRefused);
    EXPECT_EQ(run.command(DrainCommand{}).kind, Kind::kDone);
  }
}

TEST(Engines, AStepThatDoesNotEndIsReportedOnceWithItsRank) {
  for (const int late : {0, 1}) {
    EngineHarness run(tiny_model(), {.step_timeout_ns = 5 * kSecond}, 2);
    run.submit(counted_request(5, 50));
    run.submit(counted_request(5, 50, 9));
    run.ticks(5);
    const Fault fault = {.kind = Fault::Kind::kLate, .until_ns = INT64_MAX, .in_step = true};
    run.runners[static_cast<size_t>(late)]->inject(fault);
    run.tick();
    // Nor can the other rank end a step of both.
    run.runners[0]->inject(fault);
    const int64_t begin = run.clock.now_ns();
    while (run.tick(10 * kMillisecond)) ASSERT_LT(run.clock.now_ns(), begin + 6 * kSecond);
    EXPECT_EQ(run.failure,
              late == 0
                  ? "rank 0: step 5 has not ended within 5 s; rank 0 has ended step 4, rank 1 "
                    "has ended step 6; 2 requests run, 0 wait"
                  : "step 6 has not ended within 5 s; rank 0 has ended step 5, rank 1 has "
                    "ended step 5; 2 requests run, 0 wait");
  }
}

TEST(Engines, RanksOfOtherBuildsOrModelsAreRefusedByName) {
  FakeClock clock;
  for (const bool build : {false, true}) {
    FakeOptions model = tiny_model(), other = tiny_model();
    if (!build) other.facts.slots = 8;
    FakeRunner runner(model, clock), others(other, clock);
    LocalLinks links(2);
    LocalLink link(links, 1);
    Follower follower(link, others, build ? "another" : "this");
    EngineOptions options;
    options.build = "this";
    Engine engine(runner, &links, nullptr, clock, options);
    try {
      engine.step(0);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                cat("rank 1: it runs another program or model: ",
                    build ? "build=another, expected build=this" : "slots=8, expected slots=4"));
    }
  }
}

// A rank that was told to leave may be gone before rank 0 looks again.
TEST(Engines, RanksThatLeaveAsToldHaveNotFailed) {
  struct GoneLinks final : FollowerLinks {
    int num_ranks() const override { return 2; }
    void send(int, std::string_view) override {}
    std::optional<RankMessage> receive(int64_t) override {
      if (std::exchange(told, true)) return std::nullopt;
      return RankMessage{1, "", true};
    }
    bool told = false;
  } links;
  FakeClock clock;
  FakeRunner runner(tiny_model(), clock);
  RankGroup ranks(runner, &links, clock);
  const std::optional<RankFailure> failure = ranks.poll(0);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->message, "its process has ended");
  RankGroup stopped(runner, &links, clock);
  stopped.stop();
  links.told = false;
  EXPECT_FALSE(stopped.poll(0));
}

TEST(Engines, APlanThatDoesNotFollowEndsTheRank) {
  FakeClock clock;
  FakeRunner runner(tiny_model(), clock), other(tiny_model(), clock);
  LocalLinks links(2);
  LocalLink link(links, 1);
  Follower follower(link, other, "");
  RankGroup ranks(runner, &links, clock);
  StepPlan plan;
  plan.step = 2;
  ranks.launch([&] {
    StepPlan first;
    first.step = first.weights_version = 1;
    return first;
  }());
  follower.pump(0);
  runner.take(0);
  plan.previous_hash = 5;
  plan.weights_version = 1;
  EXPECT_THROW(ranks.launch(plan), InternalError);  // the fake model's own check, on rank 0
  try {
    follower.pump(0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "the plan of step 2 does not follow that of step 1, which this rank has");
  }
}

}  // namespace
}  // namespace megatron
