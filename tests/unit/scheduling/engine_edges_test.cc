// Where other engines have given wrong answers or none: after every kind of end, with a cache that
// one request fills, while weights are exchanged, with clocks that disagree.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "engine_harness.h"

namespace megatron {
namespace {

using Kind = CommandOutcome::Kind;

FakeOptions model_of_edges() {
  FakeOptions options;
  options.facts = {.vocab_size = 250,
                   .max_positions = 96,
                   .slots = 4,
                   .block_size = 4,
                   .device_blocks = 96,
                   .weights_version = 1};
  return options;
}

// Requests that end in each way, by the seventh token that they would get alone.
std::vector<RequestSpec> every_end(const Tokenizer& tokenizer) {
  const RequestSpec plain = counted_request(11, 24);
  const AloneOutput alone = run_alone(model_of_edges(), plain, 0);
  std::vector<RequestSpec> specs(6, plain);
  specs[0].stop.max_tokens = 7;
  specs[1].stop.end_tokens = {alone.ids[6]};
  specs[2].stop.stop_tokens = {alone.ids[6]};
  specs[3].stop.stop_texts = {tokenizer.decode(std::vector<int32_t>{alone.ids[6]})};
  specs[4].timeout_ns = 5 * kMillisecond;
  specs[5].sampling.forbidden = {kBreaksLogits};
  return specs;
}

// Whatever the last request ended by, the next one that begins with its prompt and any part of its
// answer is the same from the cache as without one.
TEST(EngineEdges, AnswersAfterEveryKindOfEndAreThoseOfAColdCache) {
  const auto tokenizer = byte_tokenizer();
  std::set<FinishReason> reasons;
  for (const RequestSpec& first : every_end(*tokenizer))
    for (const bool cancelled : {false, true})
      for (size_t more = 0; more <= 7; ++more) {
        EngineHarness run(model_of_edges(), {}, 1, tokenizer.get());
        const RequestId before = run.submit(first);
        run.ticks(3);
        if (cancelled) run.engine->cancel(before);
        run.finish_all();
        reasons.insert(run.of(before).finish->reason);
        RequestSpec next = counted_request(11, 12);
        const std::vector<GeneratedToken>& answer = run.of(before).tokens;
        for (size_t i = 0; i < std::min(more, answer.size()); ++i)
          next.prompt.push_back(answer[i].id);
        const RequestId after = run.submit(next);
        run.finish_all();
        run.check_outputs();
        EXPECT_GE(run.of(after).finish->usage.cached_tokens, 8);
      }
  EXPECT_EQ(reasons.size(), 7u);
}

// What is of use later is done while nothing waits, piece by piece, and never between the steps of
// a request or while the engine is paused.
TEST(EngineEdges, IdleWorkIsDoneWhileNothingWaits) {
  int pieces = 0;
  bool may = true;
  EngineOptions options;
  options.when_idle = [&] {
    EXPECT_TRUE(may);
    return ++pieces <= 20;
  };
  EngineHarness run(model_of_edges(), options);
  run.ticks(3);
  const int before = pieces;
  EXPECT_GE(before, 2);
  may = false;
  run.submit(counted_request(11, 12));
  run.finish_all();
  EXPECT_EQ(pieces, before);
  EXPECT_TRUE(run.command(PauseCommand{PauseMode::kKeep}).message.empty());
  run.ticks(5);
  EXPECT_EQ(pieces, before);
  may = true;
  EXPECT_TRUE(run.command(ResumeCommand{}).message.empty());
  run.ticks(30);
  EXPECT_GT(pieces, 20);
  run.check_outputs();
}

// Many prompts of the longest length on a cache that holds one of them.
TEST(EngineEdges, PromptsThatFillTheCacheAreServedInTurns) {
  FakeOptions model = model_of_edges();
  model.facts.device_blocks = 24;
  EngineHarness run(model, {.scheduler = {.max_step_tokens = 40, .max_waiting = 128}});
  for (int32_t i = 0; i < 128; ++i) run.submit(counted_request(90, 6, 1 + i));
  run.finish_all();
  run.check_outputs();
  run.ticks(2);
  run.check_empty();
  EXPECT_EQ(run.engine->stats().finished[static_cast<size_t>(FinishReason::kLength)], 128u);
}

// Requests all the time, a thousand pauses, new weights and resumptions: each token names the
// weights that gave it, and each text is the one that these weights give.
TEST(EngineEdges, AThousandExchangesOfWeightsUnderLoad) {
  EngineHarness run(model_of_edges(), {}, 2);
  int32_t requests = 0;
  size_t versions = 0;
  for (int64_t version = 2; version <= 1001; ++version) {
    for (int i = 0; i < 2; ++i) run.submit(counted_request(5, 6, 1 + ++requests % 200));
    run.ticks(static_cast<int>(version % 4));
    const PauseMode mode = version % 3 == 0 ? PauseMode::kFinish : PauseMode::kKeep;
    ASSERT_EQ(run.command(PauseCommand{mode}).kind, Kind::kDone);
    run.submit(counted_request(7, 3, 1 + ++requests % 200));  // waits for the resumption
    ASSERT_EQ(run.command(UpdateWeightsCommand{"new", version, version % 2 == 0}).kind,
              Kind::kDone);
    ASSERT_EQ(run.command(ResumeCommand{}).kind, Kind::kDone);
  }
  run.finish_all();
  run.check_empty();
  for (const auto& [key, choice] : run.received) {
    ASSERT_EQ(choice.finish->reason, FinishReason::kLength);
    ASSERT_TRUE(std::ranges::is_sorted(choice.tokens, {}, &GeneratedToken::weights_version));
    const auto first = choice.tokens.front().weights_version;
    versions += choice.tokens.back().weights_version != first ? 1 : 0;
  }
  EXPECT_EQ(run.received.size(), 3000u);
  EXPECT_GT(versions, 100u);  // texts that were written by two of them
}

// A clock that is off, and a clock that goes back now and then.
class StrangeClock final : public Clock {
 public:
  StrangeClock(int64_t offset_ns, int64_t step_back_ns)
      : offset_ns_(offset_ns), step_back_ns_(step_back_ns) {}
  int64_t now_ns() const override {
    const int64_t back = step_back_ns_ > 0 && ++reads_ % 50 == 0 ? step_back_ns_ : 0;
    return clock_.now_ns() + offset_ns_ - back;
  }

 private:
  MonotonicClock clock_;
  int64_t offset_ns_, step_back_ns_;
  mutable std::atomic<int64_t> reads_ = 0;
};

// Rank 0's clock decides; no time of another rank does.
TEST(EngineEdges, RanksWhoseClocksDisagreeDecideAlike) {
  constexpr int64_t kHour = 3600 * kSecond;
  const MonotonicClock clock;
  const FakeOptions model = model_of_edges();
  FakeRunner runner(model, clock);
  const StrangeClock clocks[] = {{kHour, 0}, {-kHour, 0}, {0, 10 * kMillisecond}};
  LocalLinks links(4);
  std::vector<std::thread> ranks;
  for (int rank = 1; rank < 4; ++rank)
    ranks.emplace_back([&, rank] {
      const Clock& own = clocks[rank - 1];
      FakeRunner other(model, own);
      LocalLink link(links, rank);
      follow(link, other, own, {});
    });
  Engine engine(runner, &links, nullptr, clock, {.check_invariants = true});
  while (engine.step(kMillisecond).state == EngineState::kStarting) {
  }
  std::map<RequestId, RequestSpec> specs;
  for (int32_t i = 0; i < 40; ++i) {
    RequestSpec spec = counted_request(5, 8 + i % 20, 1 + i);
    if (i % 8 == 7) {
      spec.stop.max_tokens = 90;
      spec.timeout_ns = 1;
    }
    specs.emplace(*engine.submit(spec).id, spec);
  }
  std::map<RequestId, std::vector<int32_t>> ids;
  size_t ended = 0;
  while (ended < specs.size()) {
    engine.step(kMillisecond);
    for (const Event& event : engine.take_events()) {
      for (const GeneratedToken& token : event.tokens) ids[event.request].push_back(token.id);
      if (!event.finish) continue;
      ++ended;
      EXPECT_EQ(event.finish->reason, specs.at(event.request).timeout_ns == 1
                                          ? FinishReason::kDeadline
                                          : FinishReason::kLength);
      EXPECT_GE(event.finish->total_ns, 0);
      EXPECT_LT(event.finish->total_ns, 60 * kSecond);
    }
  }
  const Ticket drained = engine.command(DrainCommand{}, 60 * kSecond);
  while (!drained.outcome()) engine.step(kMillisecond);
  for (std::thread& rank : ranks) rank.join();
  for (const auto& [id, spec] : specs)
    if (spec.timeout_ns != 1) {
      EXPECT_EQ(ids[id], run_alone(model, spec, 0).ids);
    }
  EXPECT_GT(engine.stats().gap.count(), 0u);
  EXPECT_GE(engine.stats().gap.sum_ns(), 0);
}

}  // namespace
}  // namespace megatron
