// Drafts by a second model, a fake one: which ones stand, what its cache keeps, and what it does
// while the engine is suspended.
#include "megatron/inference/speculation/draft_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "engine_harness.h"
#include "tests/unit/error_of.h"
#include "toy_grammar.h"

namespace megatron {
namespace {

FakeOptions target_model() {
  FakeOptions options;
  options.facts = {.vocab_size = 250,
                   .hidden_size = 2,
                   .num_adapters = 1,
                   .slots = 4,
                   .block_size = 4,
                   .device_blocks = 80,
                   .weights_version = 1};
  return options;
}

// An engine with a draft model: the target's twin unless it is changed.
struct Drafted {
  explicit Drafted(FakeOptions draft = target_model(), int64_t step_tokens = 64,
                   int32_t max_drafts = 4, const FakeOptions& target = target_model())
      : runner(draft, clock) {
    DraftModelOptions options;
    options.vocab_size = target.facts.vocab_size;
    options.max_step_tokens = step_tokens;
    options.poison_freed_blocks = true;
    drafts = std::make_shared<DraftModel>(runner, options);
    EngineOptions engine;
    engine.scheduler.draft_source = drafts;
    engine.scheduler.max_drafts = max_drafts;
    run.emplace(target, engine, 1, nullptr, 0, [this](StepRunner& first) -> StepRunner& {
      return both.emplace(first, runner, *drafts);
    });
  }
  ~Drafted() {
    run->finish_all();
    run->check_outputs();
    run->check_empty();
    EXPECT_TRUE(drafts->empty());
  }
  EngineStats stats() const { return run->engine->stats(); }

  FakeClock clock;
  FakeRunner runner;
  std::shared_ptr<DraftModel> drafts;
  std::optional<DraftedRunner> both;
  std::optional<EngineHarness> run;
};

RequestSpec spec_of(int64_t prompt, int64_t output, int32_t first = 1) {
  RequestSpec spec = counted_request(prompt, output, first);
  spec.sampling.temperature = 1.0;
  return spec;
}

TEST(DraftModels, ATwinsDraftsAllStand) {
  Drafted drafted;
  std::vector<RequestSpec> specs(6, spec_of(9, 30));
  specs[1].sampling.repetition_penalty = 1.2;
  specs[2].grammar = std::make_shared<const ToyGrammar>(size_t{20});
  specs[2].stop.end_tokens = {kToyEnd};
  specs[3].choices = 3;
  specs[4].stop.min_tokens = 25;
  for (int32_t i = 0; i < 90; ++i) specs[4].stop.end_tokens.push_back(i);
  specs[5].sampling.temperature = 0.0;
  for (const RequestSpec& spec : specs) drafted.run->submit(spec);
  drafted.run->finish_all();
  const EngineStats stats = drafted.stats();
  EXPECT_EQ(stats.accepted_drafts, stats.drafts);
  // Nearly four of five tokens are drafts.
  EXPECT_GT(stats.drafts * 10, stats.output_tokens * 7);
}

// The i-th id is congruent to i modulo 5.
class CountingGrammar final : public TokenGrammar {
 public:
  std::unique_ptr<TokenMatcher> start() const override { return std::make_unique<Matcher>(); }

 private:
  class Matcher final : public TokenMatcher {
   public:
    void fill(std::span<uint32_t> mask) override {
      std::ranges::fill(mask, 0U);
      for (int64_t id = count_ % 5; id < 250; id += 5)
        mask[static_cast<size_t>(id / 32)] |= uint32_t{1} << (id % 32);
    }
    bool accept(int32_t id) override { return id % 5 == count_ % 5 && ++count_ > 0; }
    void roll_back(int64_t count) override { count_ -= count; }
    bool has_ended() const override { return false; }

   private:
    int64_t count_ = 0;
  };
};

// Those that do not follow the grammar would be cut off before they are computed.
TEST(DraftModels, DraftsFollowTheGrammar) {
  Drafted drafted;
  RequestSpec spec = spec_of(9, 60);
  spec.grammar = std::make_shared<const CountingGrammar>();
  drafted.run->submit(spec);
  drafted.run->finish_all();
  const EngineStats stats = drafted.stats();
  EXPECT_EQ(stats.accepted_drafts, stats.drafts);
  EXPECT_GT(stats.drafts * 10, stats.output_tokens * 7);
}

TEST(DraftModels, DraftsThatStandSaveSteps) {
  Drafted drafted;
  drafted.run->submit(spec_of(5, 41));
  drafted.run->finish_all();
  // The prompt, then 5 tokens a step.
  EXPECT_EQ(drafted.stats().steps, 9U);
  EXPECT_EQ(drafted.stats().accepted_drafts, 32U);
  // It reads each id once: 6 and three drafts; then the last draft, what came behind it and three
  // new drafts.
  EXPECT_EQ(drafted.drafts->rows(), 9U + 7 * 5);
}

TEST(DraftModels, AnotherModelIsReadAgainBehindItsMistakes) {
  FakeOptions other = target_model();
  other.facts.weights_version = 7;  // nothing that it draws is what the target draws
  Drafted drafted(other);
  drafted.run->submit(spec_of(9, 30));
  drafted.run->finish_all();
  EXPECT_GT(drafted.stats().drafts, 20U);
  EXPECT_LT(drafted.stats().accepted_drafts, 3U);
}

// What it has read of its own drafts is not the text's where the text went another way, however
// much was added to it since.
TEST(DraftModels, RefusedDraftsAreReadAgain) {
  const auto drafts_of = [](DraftModel& model, Sequence& sequence) {
    std::vector<DraftQuery> queries = {{&sequence, 6}};
    model.propose(queries);
    return queries[0].drafts;
  };
  const FakeClock clock;
  Sequence sequence;
  sequence.group = std::make_shared<SequenceGroup>();
  sequence.ids = {1, 2, 3, 4, 5, 6, 7};
  FakeRunner runner(target_model(), clock);
  DraftModel model(runner, {.vocab_size = 250});
  for (int32_t round = 1; round < 6; ++round) {
    const std::vector<int32_t> refused = drafts_of(model, sequence);
    ASSERT_EQ(refused.size(), 6U);
    sequence.ids.push_back(refused[0]);
    for (int32_t i = 1; i <= round; ++i)
      sequence.ids.push_back((refused[static_cast<size_t>(i)] + i) % 250);
    FakeRunner other(target_model(), clock);
    DraftModel fresh(other, {.vocab_size = 250});
    EXPECT_EQ(drafts_of(model, sequence), drafts_of(fresh, sequence)) << round;
  }
}

TEST(DraftModels, LongTextsAreReadInChunks) {
  Drafted drafted(target_model(), /*step_tokens=*/6);
  for (int32_t i = 0; i < 3; ++i) drafted.run->submit(spec_of(50, 30, 1 + 60 * i));
  drafted.run->finish_all();
  const EngineStats stats = drafted.stats();
  EXPECT_EQ(stats.accepted_drafts, stats.drafts);
  EXPECT_GT(stats.drafts, 10U);
}

TEST(DraftModels, PromptsThatBeginAlikeAreReadOnce) {
  uint64_t rows[2];
  for (const bool alike : {false, true}) {
    Drafted drafted;
    for (int32_t i = 0; i < 2; ++i) {
      drafted.run->submit(spec_of(40, 9, alike ? 1 : 1 + 50 * i));
      drafted.run->finish_all();
    }
    rows[alike] = drafted.drafts->rows();
  }
  // Whole blocks in front of the last id that was read.
  EXPECT_EQ(rows[0] - rows[1], 40U);
  // Not those of another salt.
  Drafted drafted;
  for (const char* salt : {"a", "b"}) {
    RequestSpec spec = spec_of(40, 9);
    spec.cache_salt = salt;
    drafted.run->submit(spec);
    drafted.run->finish_all();
  }
  EXPECT_EQ(drafted.drafts->rows(), rows[0]);
}

TEST(DraftModels, ASmallCacheGoesFromTextToText) {
  FakeOptions small = target_model();
  small.facts.device_blocks = 13;  // of a text and a half
  Drafted drafted(small);
  for (int32_t i = 0; i < 6; ++i) drafted.run->submit(spec_of(9, 20 + 3 * i, 1 + 30 * i));
  drafted.run->finish_all();
  const EngineStats stats = drafted.stats();
  EXPECT_EQ(stats.accepted_drafts, stats.drafts);
  EXPECT_GT(stats.drafts, 20U);
  EXPECT_LT(stats.drafts, stats.output_tokens / 2);
}

TEST(DraftModels, WhatItDoesNotKnowGetsNoDrafts) {
  FakeOptions narrow = target_model();
  narrow.facts.vocab_size = 200;
  Drafted drafted(narrow);
  RequestSpec strange = spec_of(9, 12);
  strange.prompt[3] = 230;
  drafted.run->submit(strange);
  RequestSpec rows = spec_of(9, 12);
  rows.rows = std::make_shared<const GivenRows>(GivenRows{2, 2, {1, 2, 3, 4}});
  drafted.run->submit(rows);
  drafted.run->finish_all();
  EXPECT_EQ(drafted.drafts->rows(), 0U);
  // It guesses for a text with an adapter, which it does not have.
  Drafted whole;
  RequestSpec adapted = spec_of(9, 30);
  adapted.adapter = 0;
  whole.run->submit(adapted);
  whole.run->finish_all();
  EXPECT_GT(whole.stats().drafts, 20U);
  EXPECT_LT(whole.stats().accepted_drafts, 3U);
}

TEST(DraftModels, ItIsSuspendedWithItsTarget) {
  const MemoryLevel levels[] = {MemoryLevel::kKeep, MemoryLevel::kOffload, MemoryLevel::kDrop};
  for (const MemoryLevel cache : levels)
    for (const MemoryLevel weights : levels) {
      Drafted drafted;
      drafted.run->submit(spec_of(9, 60));
      drafted.run->ticks(6);
      const uint64_t before = drafted.drafts->rows();
      EXPECT_GT(before, 0U);
      for (const EngineCommand& command : std::initializer_list<EngineCommand>{
               PauseCommand{PauseMode::kKeep}, SuspendCommand{cache, weights}})
        EXPECT_EQ(drafted.run->command(command).kind, CommandOutcome::Kind::kDone);
      const bool stays = cache == MemoryLevel::kKeep && weights == MemoryLevel::kKeep;
      EXPECT_EQ(drafted.runner.on_device(), stays);
      EXPECT_EQ(drafted.run->command(ResumeCommand{}).kind, CommandOutcome::Kind::kDone);
      EXPECT_TRUE(drafted.runner.on_device());
      drafted.run->finish_all();
      EXPECT_EQ(drafted.stats().accepted_drafts, drafted.stats().drafts);
    }
}

// What one of the two cannot do, the other takes back.
TEST(DraftModels, ATransitionIsThatOfBothOrOfNone) {
  for (const bool of_draft : {false, true}) {
    Drafted drafted;
    FakeRunner& failing = of_draft ? drafted.runner : *drafted.run->runners[0];
    drafted.run->command(PauseCommand{});
    failing.inject({.kind = Fault::Kind::kRefuse});
    CommandOutcome outcome = drafted.run->command(SuspendCommand{});
    EXPECT_EQ(outcome.kind, CommandOutcome::Kind::kFailed);
    EXPECT_NE(outcome.message.find(of_draft ? "the draft model: it cannot" : "it cannot"),
              std::string::npos);
    EXPECT_TRUE(drafted.runner.on_device() && drafted.run->runners[0]->on_device());
    EXPECT_EQ(drafted.run->command(SuspendCommand{}).kind, CommandOutcome::Kind::kDone);
    failing.inject({.kind = Fault::Kind::kRefuse});
    EXPECT_EQ(drafted.run->command(ResumeCommand{}).kind, CommandOutcome::Kind::kFailed);
    EXPECT_FALSE(drafted.runner.on_device() || drafted.run->runners[0]->on_device());
    EXPECT_EQ(drafted.run->command(ResumeCommand{}).kind, CommandOutcome::Kind::kDone);
    drafted.run->submit(spec_of(9, 12));
  }
}

// Other weights of the target are not the draft model's: it guesses on.
TEST(DraftModels, OtherWeightsAreTheTargetsAlone) {
  Drafted drafted;
  drafted.run->submit(spec_of(9, 30));
  EXPECT_EQ(drafted.run->command(UpdateWeightsCommand{"new", 2, true}).kind,
            CommandOutcome::Kind::kDone);
  EXPECT_EQ(drafted.runner.version(), 1);
  drafted.run->finish_all();
  EXPECT_GT(drafted.stats().drafts, drafted.stats().accepted_drafts);
}

TEST(DraftModels, WhatCannotBeOneIsRefused) {
  FakeOptions states = target_model();
  states.facts.owns_state = true;
  const FakeClock clock;
  FakeRunner runner(states, clock);
  EXPECT_EQ(error_of([&] { DraftModel(runner, {.vocab_size = 250}); }),
            "a draft model takes back what it has read where a text turns out otherwise, and this "
            "one has states of fixed size, of which nothing can be taken back");
}

TEST(DraftModels, AStepThatDoesNotEndFailsTheEngine) {
  const FakeClock clock;
  FakeRunner runner(target_model(), clock);
  DraftModel drafts(runner, {.vocab_size = 250, .step_timeout_ns = 200'000'000});
  runner.inject({.kind = Fault::Kind::kLate, .until_ns = 1, .in_step = true});
  Sequence sequence;
  sequence.group = std::make_shared<SequenceGroup>();
  sequence.ids = {1, 2, 3};
  std::vector<DraftQuery> queries = {{&sequence, 3}};
  EXPECT_EQ(error_of([&] { drafts.propose(queries); }),
            "a step of the draft model has not ended in 0.2 s");
}

}  // namespace
}  // namespace megatron
