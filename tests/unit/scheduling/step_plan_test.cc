#include "megatron/scheduling/step_plan.h"

#include <gtest/gtest.h>

#include "../error_of.h"
#include "megatron/base/check.h"

namespace megatron {
namespace {

StepPlan full_plan() {
  StepPlan plan;
  plan.step = 7;
  plan.previous_hash = 0x0123456789abcdef;
  plan.weights_version = 3;
  plan.releases = {1, 2};
  plan.swap_out = {{3, 4}};
  plan.swap_in = {{5, 6}, {7, 8}};
  plan.state_swap_out = {{0, 1}};
  plan.state_swap_in = {{2, 0}};
  plan.copies = {{1, 2, 3}};
  plan.poison = {9};
  SlotStart start;
  start.slot = 1;
  start.request = RequestId{12};
  start.choice = 2;
  start.adapter = 4;
  start.prompt_length = 5;
  start.ids = {1, 2, 3};
  start.rows = std::make_shared<GivenRows>(
      GivenRows{2, 2, {1, 2, 3, 4}, {2, 2}, {0, 0, 0, 0, 0, 1}, {-1, 7}});
  start.state_input = std::make_shared<StateInput>(StateInput{{8, 9}, {1, 2}, {0.5f, 0.25f}});
  start.sampling.temperature = 0.7;
  start.sampling.logit_bias = {{1, -1.5f}, {8, 2.0f}};
  start.sampling.forbidden = {5};
  start.sampling.seed = ~uint64_t{0};
  start.log_probabilities.output_top = 3;
  start.min_tokens = 2;
  start.ends = {0, 99};
  plan.starts = {start};
  plan.blocks = {{1, 0, {10, 11}}, {3, 1, {}}};
  plan.parts = {{3, 8, 1, 9, 0, 0, true, true}, {1, 0, 3, 5, 1, 2, false, false}};
  plan.tokens = {kLastSampled, kGivenRow, kGivenRow, 1};
  plan.targets = {1, 2};
  plan.masks = {0xf0f0f0f0, 3};
  return plan;
}

TEST(StepPlans, SurviveTheWire) {
  const StepPlan plan = full_plan();
  const std::string bytes = serialise(plan);
  const StepPlan read = parse_step_plan(bytes);
  EXPECT_EQ(serialise(read), bytes);
  EXPECT_EQ(hash(read), hash(plan));
  EXPECT_EQ(read.parts, plan.parts);
  EXPECT_EQ(read.tokens, plan.tokens);
  ASSERT_EQ(read.starts.size(), 1u);
  EXPECT_EQ(read.starts[0].sampling, plan.starts[0].sampling);
  EXPECT_EQ(read.starts[0].rows->values, plan.starts[0].rows->values);
  EXPECT_EQ(read.starts[0].rows->ids, plan.starts[0].rows->ids);
  EXPECT_EQ(read.starts[0].state_input->ids, plan.starts[0].state_input->ids);
  EXPECT_EQ(read.rows(), 4);
  EXPECT_EQ(read.num_draws(), 1);
}

TEST(StepPlans, EveryPartOfAPlanIsInItsHash) {
  const std::string bytes = serialise(full_plan());
  const uint64_t whole = hash(full_plan());
  std::vector<void (*)(StepPlan&)> changes = {
      [](StepPlan& p) { ++p.step; },
      [](StepPlan& p) { ++p.previous_hash; },
      [](StepPlan& p) { ++p.weights_version; },
      [](StepPlan& p) { p.releases.pop_back(); },
      [](StepPlan& p) { ++p.swap_out[0].host; },
      [](StepPlan& p) { ++p.swap_in[1].device; },
      [](StepPlan& p) { ++p.state_swap_out[0].host; },
      [](StepPlan& p) { p.state_swap_in.clear(); },
      [](StepPlan& p) { ++p.copies[0].positions; },
      [](StepPlan& p) { p.poison.clear(); },
      [](StepPlan& p) { ++p.starts[0].ids[0]; },
      [](StepPlan& p) { p.starts[0].rows = nullptr; },
      [](StepPlan& p) {
        p.starts[0].rows = std::make_shared<GivenRows>(
            GivenRows{2, 2, {1, 2, 3, 4}, {1, 2}, {0, 0, 0, 0, 0, 1}, {-1, 7}});
      },
      [](StepPlan& p) {
        p.starts[0].rows = std::make_shared<GivenRows>(
            GivenRows{2, 2, {1, 2, 3, 4}, {2, 2}, {0, 0, 0, 0, 1, 0}, {-1, 7}});
      },
      [](StepPlan& p) {
        p.starts[0].rows = std::make_shared<GivenRows>(
            GivenRows{2, 2, {1, 2, 3, 4}, {2, 2}, {0, 0, 0, 0, 0, 1}, {-1, 8}});
      },
      [](StepPlan& p) { p.starts[0].sampling.min_p = 0.5; },
      [](StepPlan& p) { p.starts[0].log_probabilities.processed = true; },
      [](StepPlan& p) { p.starts[0].ends.clear(); },
      [](StepPlan& p) { ++p.blocks[1].leading_dropped; },
      [](StepPlan& p) { p.blocks[0].appended.pop_back(); },
      [](StepPlan& p) { p.parts[0].draws = false; },
      [](StepPlan& p) { ++p.parts[1].known; },
      [](StepPlan& p) { ++p.tokens[3]; },
      [](StepPlan& p) { ++p.targets[0]; },
      [](StepPlan& p) { p.parts[0].masked = false; },
      [](StepPlan& p) { ++p.parts[0].drafts; },
      [](StepPlan& p) { ++p.parts[0].stood; },
      [](StepPlan& p) { ++p.masks[1]; }};
  for (size_t i = 0; i < changes.size(); ++i) {
    StepPlan plan = full_plan();
    changes[i](plan);
    EXPECT_NE(hash(plan), whole) << i;
  }
}

TEST(StepPlans, BytesThatAreNoPlanAreRefused) {
  const std::string bytes = serialise(full_plan());
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_NE(error_of([&] { parse_step_plan(std::string_view(bytes).substr(0, size)); }), "")
        << size;
  EXPECT_EQ(error_of([&] { parse_step_plan(bytes + "x"); }),
            "a step plan has 1 bytes behind its end");
  std::string other = bytes;
  other[0] = 9;
  EXPECT_EQ(error_of([&] { parse_step_plan(other); }), "a step plan has version 9, expected 5");
  std::string flag = serialise(StepPlan{});
  StepPlan plan;
  plan.parts = {{0, 0, 1, 1, 0, 0, true}};
  flag = serialise(plan);
  // The part ends with a flag, its number of drafts and that of those that stood; three empty lists
  // follow.
  flag[flag.size() - 33] = 2;
  EXPECT_EQ(error_of([&] { parse_step_plan(flag); }),
            "a step plan has a flag that is neither 0 nor 1");
}

TEST(BlockTablesOfPlans, FollowStartsChangesAndReleases) {
  BlockTables tables(2);
  StepPlan plan;
  plan.starts.resize(1);
  plan.blocks = {{0, 0, {5, 6, 7}}};
  tables.apply(plan);
  const auto blocks = [&](int32_t slot) {
    const auto span = tables.blocks(slot);
    return std::vector<int32_t>(span.begin(), span.end());
  };
  EXPECT_EQ(blocks(0), (std::vector<int32_t>{5, 6, 7}));
  plan = {};
  plan.blocks = {{0, 1, {8}}, {1, 0, {1}}};
  tables.apply(plan);
  EXPECT_EQ(blocks(0), (std::vector<int32_t>{kNoBlock, 6, 7, 8}));
  EXPECT_EQ(blocks(1), (std::vector<int32_t>{1}));
  plan = {};
  plan.blocks = {{0, 2, {}}};
  tables.apply(plan);
  EXPECT_EQ(blocks(0), (std::vector<int32_t>{kNoBlock, kNoBlock, kNoBlock, 8}));
  plan.blocks = {{0, 2, {}}};
  EXPECT_THROW(tables.apply(plan), InternalError);
  plan = {};
  plan.starts.resize(1);
  EXPECT_THROW(tables.apply(plan), InternalError);
  plan.releases = {0};
  tables.apply(plan);
  EXPECT_TRUE(blocks(0).empty());
  plan = {};
  plan.releases = {2};
  EXPECT_THROW(tables.apply(plan), InternalError);
}

}  // namespace
}  // namespace megatron
