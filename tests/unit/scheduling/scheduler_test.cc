#include "megatron/scheduling/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "scheduler_simulation.h"

namespace megatron {
namespace {

FakeOptions small_model() {
  FakeOptions options;
  options.facts = {.vocab_size = 1000,
                   .max_positions = 200,
                   .slots = 4,
                   .block_size = 4,
                   .device_blocks = 64,
                   .weights_version = 1};
  return options;
}

TEST(Schedulers, DecodesGoOnNextToChunksOfPrompts) {
  SchedulerSimulation simulation({.max_step_tokens = 8}, small_model());
  simulation.submit(counted_request(3, 30, 1));
  simulation.submit(counted_request(40, 5, 100));
  simulation.run();
  simulation.check_outputs();
  int mixed = 0;
  for (const StepPlan& plan : simulation.plans) {
    EXPECT_LE(plan.rows(), 8);
    mixed += plan.parts.size() == 2 && plan.parts[1].count == 7 ? 1 : 0;
  }
  EXPECT_GE(mixed, 4);
}

// A prompt cut at every place, by budgets that leave one token, and by blocks of each size.
TEST(Schedulers, ChunksAndBlocksOfAnySizeGiveTheSameTokens) {
  for (int64_t block_size = 1; block_size <= 9; ++block_size)
    for (int64_t budget = 4; budget <= 13; ++budget) {
      FakeOptions options = small_model();
      options.facts.block_size = block_size;
      options.facts.device_blocks = 100;
      SchedulerSimulation simulation({.max_step_tokens = budget}, options);
      for (int32_t i = 0; i < 6; ++i)
        simulation.submit(counted_request(1 + 5 * i, 1 + i, 50 * i + 1));
      simulation.run();
      simulation.check_outputs();
    }
}

TEST(Schedulers, ABudgetBelowTheSlotsIsRaisedToThem) {
  SchedulerSimulation simulation({.max_step_tokens = 1}, small_model());
  for (int32_t i = 0; i < 4; ++i) simulation.submit(counted_request(5, 5, 10 * i + 1));
  simulation.run();
  simulation.check_outputs();
}

// Prefixes that end at every position of a block, after a request that ended in every way.
TEST(Schedulers, HitsAtEveryBorderAreTheColdAnswers) {
  for (int64_t shared = 1; shared <= 13; ++shared)
    for (int64_t rest = 0; rest <= 5; ++rest) {
      SchedulerSimulation simulation({}, small_model());
      const RequestSpec first = counted_request(shared, 3);
      simulation.submit(first);
      simulation.run();
      RequestSpec second = counted_request(shared, 4);
      for (int64_t i = 0; i < rest; ++i) second.prompt.push_back(static_cast<int32_t>(500 + i));
      const RequestId id = simulation.submit(second);
      simulation.run();
      simulation.check_outputs();
      const int64_t most = rest > 0 ? shared : shared - 1;
      EXPECT_EQ((simulation.cached[{id, 0}]), most) << shared << " " << rest;
    }
}

// The next turn of a conversation begins with the prompt and the answer of the last.
TEST(Schedulers, AnswersArePrefixesToo) {
  SchedulerSimulation simulation({}, small_model());
  const RequestId first = simulation.submit(counted_request(10, 9));
  simulation.run();
  RequestSpec next = counted_request(10, 6);
  const std::vector<int32_t>& answer = simulation.outputs[{first, 0}].ids;
  next.prompt.insert(next.prompt.end(), answer.begin(), answer.end());
  next.prompt.push_back(7);
  const RequestId second = simulation.submit(next);
  simulation.run();
  simulation.check_outputs();
  // Of the last token of the answer no keys were computed in a step that was read.
  EXPECT_EQ((simulation.cached[{second, 0}]), 18);
}

TEST(Schedulers, PrefixesAreSharedOnlyWithinASaltAnAdapterAndAVersion) {
  FakeOptions options = small_model();
  options.facts.num_adapters = 2;
  SchedulerSimulation simulation({}, options);
  RequestSpec spec = counted_request(17, 2);
  simulation.submit(spec);
  simulation.run();
  const auto cached = [&](const RequestSpec& changed) {
    const RequestId id = simulation.submit(changed);
    simulation.run();
    return simulation.cached[{id, 0}];
  };
  RequestSpec salted = spec, adapted = spec;
  salted.cache_salt = "tenant";
  adapted.adapter = 1;
  EXPECT_EQ(cached(spec), 16);
  EXPECT_EQ(cached(salted), 0);
  EXPECT_EQ(cached(salted), 16);
  EXPECT_EQ(cached(adapted), 0);
  EXPECT_EQ(cached(adapted), 16);
  simulation.check_outputs();
  simulation.scheduler().set_weights_version(2);
  EXPECT_EQ(cached(spec), 0);
  EXPECT_EQ(cached(spec), 16);
}

// One tenant's flood of prompts does not push out what another keeps.
TEST(Schedulers, ASaltKeepsNoMoreThanItsShareOfTheIdleCache) {
  for (const double share : {0.5, 1.0}) {
    FakeOptions options = small_model();
    options.facts.device_blocks = 32;
    SchedulerSimulation simulation({.max_idle_share = share}, options);
    RequestSpec quiet = counted_request(33, 3);
    quiet.cache_salt = "quiet";
    simulation.submit(quiet);
    simulation.run();
    for (int32_t i = 0; i < 20; ++i) {
      RequestSpec flood = counted_request(17, 3, 20 + 40 * i);
      flood.cache_salt = "loud";
      simulation.submit(flood);
      simulation.run();
    }
    const RequestId id = simulation.submit(quiet);
    simulation.run();
    simulation.check_outputs();
    EXPECT_EQ((simulation.cached[{id, 0}]), share < 1.0 ? 32 : 0);
  }
}

// Its key is drawn anew in each process: with fewer values all prompts may happen to collide.
PrefixKey weak_hash(std::string_view bytes) { return {hash_prefix(bytes).low % 16, 0}; }
PrefixKey constant_hash(std::string_view) { return {7, 7}; }

TEST(Schedulers, CollisionsOfTheHashCostHitsAndNoAnswer) {
  for (const PrefixIndex::Hash hash : {weak_hash, constant_hash}) {
    SchedulerSimulation simulation({}, small_model(), hash);
    int64_t hits = 0;
    for (int32_t i = 0; i < 40; ++i) {
      const RequestId id = simulation.submit(counted_request(9 + i % 3, 3, 1 + 20 * (i % 5)));
      simulation.run();
      hits += simulation.cached[{id, 0}];
    }
    simulation.check_outputs();
    EXPECT_EQ(hits > 0, hash == weak_hash);
  }
}

TEST(Schedulers, ChoicesShareTheBlocksOfTheirPrompt) {
  SchedulerSimulation simulation({}, small_model());
  RequestSpec spec = counted_request(33, 4);
  spec.choices = 4;
  simulation.submit(spec);
  simulation.run();
  simulation.check_outputs();
  EXPECT_LE(simulation.model().rows(), 33 + 3 * 1 + 4 * 4);
}

TEST(Schedulers, AFullPoolOfCachedBlocksIsAFreeOne) {
  FakeOptions options = small_model();
  options.facts.device_blocks = 10;
  options.facts.max_positions = 40;
  SchedulerSimulation simulation({}, options);
  for (int32_t i = 0; i < 30; ++i) {
    simulation.submit(counted_request(33, 7, 1 + 40 * (i % 7)));
    simulation.run();
  }
  simulation.check_outputs();
  EXPECT_EQ(simulation.scheduler().blocks().pool().num_held(), 0);
}

// More than the cache holds: by recomputing, by swapping, with own state, in a pipeline.
TEST(Schedulers, PreemptionChangesNoToken) {
  for (const int32_t host_blocks : {0, 7, 100})
    for (const bool owns_state : {false, true})
      for (const int32_t latency : {1, 2, 3}) {
        FakeOptions options = small_model();
        options.facts.slots = 6;
        options.facts.device_blocks = 14;
        options.facts.max_positions = 56;
        options.facts.host_blocks = host_blocks;
        options.facts.host_states = host_blocks > 0 ? 2 : 0;
        options.facts.owns_state = owns_state;
        options.facts.draw_latency = latency;
        SchedulerSimulation simulation({.swap_block_tokens = 1.0}, options);
        for (int32_t i = 0; i < 12; ++i) {
          RequestSpec spec = counted_request(3 + i, 40 - 3 * i, 10 * i + 1);
          spec.sampling.repetition_penalty = i % 2 == 0 ? 1.5 : 1.0;
          simulation.submit(spec);
        }
        simulation.run();
        simulation.check_outputs();
        EXPECT_GT(simulation.scheduler().num_preemptions(), 0u);
        EXPECT_EQ(simulation.scheduler().num_swapped_blocks() > 0, host_blocks > 0);
        EXPECT_EQ(simulation.scheduler().blocks().num_available(), 14);
      }
}

TEST(Schedulers, OneThatNeedsTheWholeCacheEnds) {
  FakeOptions options = small_model();
  options.facts.device_blocks = 8;
  options.facts.max_positions = 32;
  SchedulerSimulation simulation({.max_step_tokens = 8, .reserve_blocks = 3}, options);
  for (int32_t i = 0; i < 8; ++i) simulation.submit(counted_request(16 - i, 16 + i, 40 * i + 1));
  simulation.run();
  simulation.check_outputs();
}

TEST(Schedulers, BlocksBehindAWindowAreFreedAndNoneInIt) {
  for (int64_t window = 1; window <= 17; ++window) {
    FakeOptions options = small_model();
    options.facts.window = window;
    options.facts.device_blocks = 16;
    options.facts.max_positions = 64;
    options.facts.host_blocks = window % 2 == 0 ? 30 : 0;
    SchedulerSimulation simulation({.max_step_tokens = 9, .swap_block_tokens = 0.5}, options);
    for (int32_t i = 0; i < 6; ++i)
      simulation.submit(counted_request(20 - 3 * i, 20 + 4 * i, 9 * i + 1));
    simulation.run();
    simulation.check_outputs();
    // A conversation that goes on over a window.
    simulation.submit(counted_request(30, 10));
    simulation.run();
    simulation.check_outputs();
  }
  FakeOptions options = small_model();
  options.facts.window = 8;
  SchedulerSimulation simulation({.share_prefixes = false}, options);
  simulation.submit(counted_request(4, 100));
  int32_t most = 0;
  while (simulation.step())
    most = std::max(most, simulation.scheduler().blocks().pool().num_held());
  EXPECT_LE(most, 5);
}

TEST(Schedulers, CrossingTheBorderOfLongRopeComputesAllAnew) {
  for (int64_t prompt = 3; prompt <= 24; ++prompt) {
    FakeOptions options = small_model();
    options.facts.rope_border = 20;
    SchedulerSimulation simulation({.max_step_tokens = 6}, options);
    simulation.submit(counted_request(prompt, 20));
    simulation.run();
    simulation.submit(counted_request(prompt, 24));  // hits of the short regime, crosses in decode
    simulation.submit(counted_request(prompt + 9, 12));  // perhaps hits of the long one
    simulation.run();
    simulation.check_outputs();
  }
}

TEST(Schedulers, GivenRowsAndStatesBelongToTheirRequest) {
  FakeOptions options = small_model();
  options.facts.hidden_size = 2;
  options.facts.owns_state = options.facts.takes_state_input = true;
  options.facts.device_blocks = 20;
  options.facts.max_positions = 80;
  options.facts.host_blocks = 40;
  options.facts.host_states = 2;
  SchedulerSimulation simulation({.max_step_tokens = 7, .swap_block_tokens = 0.1}, options);
  for (int32_t i = 0; i < 9; ++i) {
    RequestSpec spec = counted_request(i == 4 ? 0 : 5, 25, 7 * i + 1);
    GivenRows rows{6 + i, 2, {}};
    for (int64_t j = 0; j < rows.count * 2; ++j)
      rows.values.push_back(static_cast<float>(i + j) / 7);
    spec.rows = std::make_shared<const GivenRows>(std::move(rows));
    spec.state_input = std::make_shared<const StateInput>(StateInput{{i, i + 1}, {}, {}});
    simulation.submit(spec);
  }
  simulation.run();
  simulation.check_outputs();
  EXPECT_GT(simulation.scheduler().num_swapped_blocks(), 0u);
}

// Rows that attend to later ones are computed together with them, whatever the budget and others.
TEST(Schedulers, RowsThatAttendToLaterOnesAreNotDivided) {
  const std::vector<int64_t> ends = {1, 5, 5, 5, 5, 6, 7, 11, 11, 11, 11, 14, 14, 14};
  for (int64_t budget = 6; budget <= 16; ++budget) {
    FakeOptions options = small_model();
    options.facts.hidden_size = 2;
    options.facts.slots = 2;
    SchedulerSimulation simulation({.max_step_tokens = budget}, options);
    simulation.submit(counted_request(3, 30));
    RequestSpec spec = counted_request(2, 4);
    spec.rows =
        std::make_shared<const GivenRows>(GivenRows{14, 2, std::vector<float>(28, 0.5F), ends});
    EXPECT_EQ(spec.rows->longest_piece(), 4);
    simulation.submit(spec);
    simulation.run();
    simulation.check_outputs();
    int64_t parts = 0;
    int32_t slot = -1;
    for (const StepPlan& plan : simulation.plans) {
      for (const SlotStart& start : plan.starts)
        if (start.rows) slot = start.slot;
      for (const PlanPart& part : plan.parts) {
        if (part.slot != slot || part.first >= 14) continue;
        ++parts;
        EXPECT_TRUE(spec.rows->stand_alone(part.first + part.count))
            << budget << ": " << part.first;
      }
    }
    EXPECT_GE(parts, budget < 10 ? 2 : 1) << budget;
  }
}

TEST(Schedulers, PromptLogProbabilitiesAreThoseOfAColdCache) {
  for (int64_t from = 0; from <= 13; from += 1) {
    SchedulerSimulation simulation({.max_step_tokens = 5}, small_model());
    RequestSpec spec = counted_request(13, 3);
    simulation.submit(spec);
    simulation.run();
    spec.log_probabilities = {.output_top = 2, .prompt_top = 1, .prompt_from = from};
    simulation.submit(spec);
    spec.stop.max_tokens = 0;
    const RequestId id = simulation.submit(spec);
    simulation.run();
    simulation.check_outputs();
    EXPECT_EQ((simulation.cached[{id, 0}]), std::clamp<int64_t>(from - 1, 0, 12));
  }
  SchedulerSimulation simulation({}, small_model());
  RequestSpec one = counted_request(1, 0);
  one.log_probabilities.prompt_top = 0;
  simulation.submit(one);
  simulation.run();
  simulation.check_outputs();
}

TEST(Schedulers, NonFiniteLogitsEndTheirRequestAlone) {
  SchedulerSimulation simulation({}, small_model());
  RequestSpec bad = counted_request(5, 20);
  bad.sampling.forbidden = {kBreaksLogits};
  simulation.submit(counted_request(5, 20, 3));
  simulation.submit(bad);
  simulation.submit(counted_request(6, 20, 9));
  simulation.run();
  simulation.check_outputs();
}

TEST(Schedulers, PriorityGoesFirstAndAgeingEndsItsPrivilege) {
  FakeOptions options = small_model();
  options.facts.slots = 1;
  const SchedulerConfig config = {.ageing_ns = 1'000'000'000};
  SchedulerSimulation simulation(config, options);
  const RequestId first = simulation.submit(counted_request(3, 5, 1));
  simulation.step();
  RequestSpec low = counted_request(3, 5, 20);
  low.priority = 3;
  const RequestId waiting = simulation.submit(low);
  const RequestId urgent = simulation.submit(counted_request(3, 5, 40));
  simulation.run();
  EXPECT_LT((simulation.ended_in[{first, 0}]), (simulation.ended_in[{urgent, 0}]));
  EXPECT_LT((simulation.ended_in[{urgent, 0}]), (simulation.ended_in[{waiting, 0}]));

  // A stream of urgent requests does not keep it waiting for ever.
  const RequestId starving = simulation.submit(low);
  int before = 0;
  while (!simulation.ended_in.contains({starving, 0})) {
    simulation.submit(counted_request(3, 5, 60));
    simulation.now_ns += 100'000'000;
    simulation.step();
    ASSERT_LT(++before, 200);
  }
  EXPECT_GT(before, 20);
}

TEST(Schedulers, QueuedRequestsSayWhatTheyWaitFor) {
  FakeOptions options = small_model();
  options.facts.slots = 2;
  options.facts.device_blocks = 10;
  options.facts.max_positions = 40;
  SchedulerSimulation simulation({.max_waiting = 3}, options);
  simulation.submit(counted_request(30, 3, 1));
  simulation.step();
  EXPECT_EQ(simulation.scheduler().waits_for(), Resource::kNothing);
  simulation.submit(counted_request(20, 3, 50));
  simulation.step();
  EXPECT_EQ(simulation.scheduler().waits_for(), Resource::kBlocks);
  simulation.submit(counted_request(5, 3, 90));
  simulation.submit(counted_request(5, 3, 90));
  const auto refusal = simulation.scheduler().submit(RequestId{99}, counted_request(5, 3, 90), 0);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->kind, Refusal::Kind::kQueueFull);
  EXPECT_EQ(refusal->message, "3 requests are waiting, of 3 at most");
  simulation.run();
  simulation.check_outputs();
}

TEST(Schedulers, CancelledRequestsLeaveNothing) {
  for (int steps = 0; steps < 40; ++steps) {
    FakeOptions options = small_model();
    options.facts.device_blocks = 12;
    options.facts.max_positions = 48;
    options.facts.host_blocks = 30;
    SchedulerSimulation simulation({.max_step_tokens = 6, .swap_block_tokens = 0.1}, options);
    std::vector<RequestId> ids;
    for (int32_t i = 0; i < 6; ++i)
      ids.push_back(simulation.submit(counted_request(9, 25, 30 * i + 1)));
    for (int i = 0; i < steps; ++i) simulation.step();
    for (const RequestId id : ids) simulation.cancel(id);
    simulation.run();
    simulation.check_outputs();
    EXPECT_EQ(simulation.scheduler().blocks().num_available(), 12);
    EXPECT_EQ(simulation.scheduler().blocks().num_pending(), 0);
  }
}

TEST(Schedulers, DeadlinesAreFound) {
  SchedulerSimulation simulation({}, small_model());
  simulation.now_ns = int64_t{1} << 53;
  RequestSpec spec = counted_request(3, 5);
  spec.timeout_ns = 1000;
  simulation.submit(spec);
  simulation.submit(counted_request(3, 5));
  EXPECT_TRUE(simulation.scheduler().expired(simulation.now_ns + 999).empty());
  EXPECT_EQ(simulation.scheduler().expired(simulation.now_ns + 1000).size(), 1u);
}

// What the cache held is lost: all is computed anew, and the tokens stay.
TEST(Schedulers, ALostCacheChangesNoToken) {
  FakeOptions options = small_model();
  options.facts.device_blocks = 14;
  options.facts.max_positions = 56;
  options.facts.host_blocks = 40;
  SchedulerSimulation simulation({.swap_block_tokens = 0.1}, options);
  for (int32_t i = 0; i < 8; ++i) simulation.submit(counted_request(9, 25, 30 * i + 1));
  for (int i = 0; i < 60; ++i) {
    for (int j = 0; j < 7; ++j) simulation.step();
    simulation.settle();
    simulation.scheduler().recompute_all();
    simulation.model().drop_cache();
    simulation.scheduler().check_invariants();
  }
  simulation.run();
  simulation.check_outputs();
}

}  // namespace
}  // namespace megatron
