// Drafts of next tokens: where they come from, and that a schedule with them gives the tokens of
// one without in fewer steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "fake_drafts.h"
#include "megatron/scheduling/prompt_lookup.h"
#include "scheduler_simulation.h"
#include "tests/unit/error_of.h"
#include "toy_grammar.h"

namespace megatron {
namespace {

// The longest match of the last ids, by looking at every place.
std::vector<int32_t> slow_continuation(const std::vector<int32_t>& ids, int64_t least, int64_t most,
                                       int64_t count) {
  const auto length = static_cast<int64_t>(ids.size());
  int64_t longest = least - 1, place = 0;
  for (int64_t end = length - 1; end > 0; --end) {
    int64_t equal = 0;
    while (equal < most && equal < end &&
           ids[static_cast<size_t>(end - 1 - equal)] ==
               ids[static_cast<size_t>(length - 1 - equal)])
      ++equal;
    if (equal <= longest) continue;
    longest = equal;
    place = end;
  }
  std::vector<int32_t> text = ids;
  for (int64_t i = 0; place > 0 && i < count; ++i)
    text.push_back(text[static_cast<size_t>(place + i)]);
  return {text.begin() + length, text.end()};
}

TEST(PromptLookup, ContinuesAsAfterTheLongestLastMatch) {
  std::mt19937 random(1);
  int64_t found = 0;
  for (int round = 0; round < 60; ++round) {
    const int64_t least = 1 + static_cast<int64_t>(random() % 3);
    const int64_t most = least + static_cast<int64_t>(random() % 4);
    RepeatedIds text(least, most);
    std::vector<int32_t> ids;
    while (ids.size() < 60) {
      for (auto more = random() % 4 + 1; more > 0; --more)
        ids.push_back(static_cast<int32_t>(random() % 5));
      const auto count = static_cast<int64_t>(random() % 6) + 1;
      const std::vector<int32_t> got = text.continuation(ids, count);
      ASSERT_EQ(got, slow_continuation(ids, least, most, count));
      found += got.empty() ? 0 : 1;
    }
  }
  EXPECT_GT(found, 500);
  // A text that goes round is continued beyond its own end.
  EXPECT_EQ(RepeatedIds(2, 8).continuation({7, 1, 2, 1, 2, 1}, 4),
            (std::vector<int32_t>{2, 1, 2, 1}));
}

TEST(GrammarFollowers, LookAheadAndStayWhereTheyAre) {
  const ToyGrammar grammar(4);
  const std::vector<int32_t> ends = {kToyEnd};
  GrammarFollower follower(grammar, 250, {6}, ends, 0);
  const std::vector<uint32_t> first(follower.mask().begin(), follower.mask().end());
  const auto words = first.size();
  for (const auto& [ids, fit] : std::vector<std::pair<std::vector<int32_t>, size_t>>{
           {{0, 3, 9}, 3},           // all fit
           {{0, 6, 9}, 1},           // 6 is forbidden
           {{1, 3}, 0},              // 1 does not fit
           {{0, 3, 9, 12, 249}, 4},  // an end: nothing comes behind it
           {{3, 4}, 1}}) {
    std::vector<uint32_t> masks;
    ASSERT_EQ(follower.look_ahead(ids, masks), fit);
    ASSERT_EQ(masks.size(), fit * words);
    GrammarFollower other(grammar, 250, {6}, ends, 0);
    for (size_t i = 0; i < fit; ++i) {
      other.advance(ids[i]);
      EXPECT_TRUE(std::ranges::equal(other.mask(), std::span(masks).subspan(i * words, words)));
    }
    EXPECT_TRUE(std::ranges::equal(follower.mask(), first));
    EXPECT_TRUE(follower.failure().empty() && !follower.has_ended());
  }
  // What is broken behind a draft is none of the text's.
  GrammarFollower broken(ToyGrammar(9, SIZE_MAX, 2), 250, {}, {}, 0);
  std::vector<uint32_t> masks;
  EXPECT_EQ(broken.look_ahead(std::vector<int32_t>{0, 3, 9}, masks), 1U);
  EXPECT_TRUE(broken.failure().empty());
  broken.advance(0);
  EXPECT_TRUE(broken.failure().empty());
}

FakeOptions drafted_model() {
  FakeOptions options;
  options.facts = {.vocab_size = 250, .slots = 4, .block_size = 4, .device_blocks = 40};
  return options;
}

SchedulerConfig with_drafts(const FakeOptions& options, uint32_t mistakes) {
  SchedulerConfig config;
  config.max_drafts = 4;
  config.draft_source = std::make_shared<FakeDrafts>(options, 1, mistakes);
  return config;
}

TEST(Speculation, DraftsThatStandSaveSteps) {
  const FakeOptions options = drafted_model();
  SchedulerSimulation plain({}, options), drafted(with_drafts(options, 1U << 30), options);
  for (SchedulerSimulation* run : {&plain, &drafted}) {
    run->submit(counted_request(5, 41));
    run->run();
    run->check_outputs();
  }
  EXPECT_EQ(plain.plans.size(), 41U);
  // The prompt, then 5 tokens a step.
  EXPECT_EQ(drafted.plans.size(), 9U);
  EXPECT_EQ(drafted.scheduler().num_drafts(), 32U);
  EXPECT_EQ(drafted.scheduler().num_accepted_drafts(), 32U);
}

TEST(Speculation, WrongDraftsAreFewAndChangeNothing) {
  const FakeOptions options = drafted_model();
  SchedulerSimulation run(with_drafts(options, 1), options);
  run.submit(counted_request(5, 41));
  run.run();
  run.check_outputs();
  EXPECT_EQ(run.plans.size(), 41U);
  EXPECT_EQ(run.scheduler().num_accepted_drafts(), 0U);
  EXPECT_EQ(run.scheduler().num_drafts(), 4U + 38U);
}

TEST(Speculation, PromptsAreReadBesideDrafts) {
  FakeOptions options = drafted_model();
  options.facts.device_blocks = 12;
  SchedulerConfig config = with_drafts(options, 1U << 30);
  config.max_step_tokens = 12;
  SchedulerSimulation run(config, options);
  for (int32_t i = 0; i < 8; ++i) run.submit(counted_request(9, 12, 1 + 20 * i));
  run.run();
  run.check_outputs();
  bool beside = false;
  for (const StepPlan& plan : run.plans) {
    ASSERT_LE(plan.rows(), 12);
    int64_t drafts = 0, prompts = 0;
    for (const PlanPart& part : plan.parts) {
      drafts += part.drafts;
      prompts += part.first < 9 ? part.count : 0;
    }
    beside |= drafts > 0 && prompts > 0;
  }
  EXPECT_TRUE(beside) << "no prompt was read beside drafts";
}

// The plan says which drafts stand, as those that a state has to read.
TEST(Speculation, StatesReadDraftsThatStand) {
  FakeOptions options = drafted_model();
  options.facts.owns_state = true;
  options.facts.state_drafts = 4;
  SchedulerSimulation run(with_drafts(options, 3), options);
  run.submit(counted_request(5, 41));
  run.run();
  run.check_outputs();
  int64_t stood = 0, first = 0;
  for (const StepPlan& plan : run.plans)
    for (const PlanPart& part : plan.parts) {
      EXPECT_EQ(part.first, first + part.stood);
      first = part.first + part.count - part.drafts;
      stood += part.stood;
    }
  EXPECT_GT(stood, 8);
  EXPECT_LE(stood, static_cast<int64_t>(run.scheduler().num_accepted_drafts()));
}

TEST(Speculation, StatesAreKeptForSoManyDrafts) {
  FakeOptions options = drafted_model();
  options.facts.owns_state = true;
  options.facts.state_drafts = 3;
  EXPECT_EQ(error_of([&] { Scheduler(with_drafts(options, 2), options.facts); }),
            "speculative decoding takes back what was computed of tokens that were not drawn, and "
            "the states of fixed size of this model are kept for 3 of them at a time, not for 4");
  options.facts.state_drafts = 4;
  EXPECT_EQ(error_of([&] { Scheduler(with_drafts(options, 2), options.facts); }), "");
}

}  // namespace
}  // namespace megatron
