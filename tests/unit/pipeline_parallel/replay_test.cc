#include "megatron/pipeline_parallel/replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "megatron/pipeline_parallel/transfers.h"
#include "testing.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using Kind = Action::Kind;

double makespan(ScheduleKind kind, const ScheduleShape& shape) {
  return replay(make_schedule(kind, shape), shape.costs).makespan;
}

// Bubble of 1F1B and GPipe: (P - 1) / (M + P - 1); divided by V when interleaved.
TEST(Replay, BubblesAreTheKnownOnes) {
  for (const auto& [stages, chunks, microbatches] : std::vector<std::array<int, 3>>{{1, 1, 3},
                                                                                    {2, 1, 2},
                                                                                    {4, 1, 8},
                                                                                    {8, 1, 16},
                                                                                    {4, 2, 8},
                                                                                    {8, 4, 16},
                                                                                    {2, 3, 6},
                                                                                    {4, 2, 4}}) {
    const double fill = (stages - 1.0) / chunks;
    for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kGPipe}) {
      const Replay r = replay(make_schedule(kind, shape_of(stages, chunks, microbatches)));
      EXPECT_NEAR(r.bubble_fraction, fill / (microbatches + fill), 1e-12);
      EXPECT_NEAR(r.makespan, 3 * (microbatches + fill), 1e-9);
    }
  }
}

// What 1F1B is for: GPipe holds every micro-batch, 1F1B as many as there are stages from here on.
TEST(Replay, MemoryIsTheKnownOne) {
  const Replay gpipe = replay(make_schedule(ScheduleKind::kGPipe, shape_of(4, 1, 16)));
  const Replay one = replay(make_schedule(ScheduleKind::k1F1B, shape_of(4, 1, 16)));
  const Replay h1 = replay(make_schedule(ScheduleKind::kZeroBubbleH1, shape_of(4, 1, 16)));
  const Replay v = replay(make_schedule(ScheduleKind::kZeroBubbleV, shape_of(4, 2, 16)));
  for (int r = 0; r < 4; ++r) {
    const auto at = [r](const Replay& replay) { return replay.stages[static_cast<size_t>(r)]; };
    EXPECT_EQ(at(gpipe).peak_activations, 16);
    EXPECT_EQ(at(one).peak_activations, 4 - r);
    EXPECT_EQ(at(one).peak_awaiting_gradient, 4 - r);
    EXPECT_EQ(at(h1).peak_activations, 4);  // 1F1B's first stage; the rest waits for W
    EXPECT_EQ(at(h1).peak_awaiting_gradient, 4 - r);
    EXPECT_EQ(at(h1).peak_pending_weight, r == 0 ? 0 : r + 1);
    EXPECT_EQ(at(v).peak_activations, 8);  // halves of a stage: as much
  }
  EXPECT_EQ(one.peak_activations(), 4);
}

// -- the vocabulary over the stages

ScheduleShape vocab_shape(int stages, int microbatches, double head) {
  ScheduleShape shape = shape_of(stages, 1, microbatches);
  shape.vocab_parallel = true;
  shape.costs.head = head / stages;
  shape.costs.loss = 2 * head / stages;
  return shape;
}

// Whatever the calls of all stages hold up: with one call posted early, late, or holding up who
// makes it.
TEST(Replay, TheVocabularyOverTheStagesNeverDeadlocks) {
  for (int stages = 2; stages <= 17; ++stages)
    for (const int microbatches : {1, 2, 3, 4, 5, 7, 8, 16, 33})
      for (const TransferMode mode :
           {TransferMode::kOverlapped, TransferMode::kOnDemand, TransferMode::kBlocking}) {
        const ScheduleShape shape = vocab_shape(stages, microbatches, 1);
        const Replay training =
            replay(make_schedule(ScheduleKind::k1F1B, shape), shape.costs, mode);
        replay(make_forward_schedule(ScheduleKind::k1F1B, shape), shape.costs, mode);
        for (int r = 0; r < stages; ++r)
          EXPECT_EQ(training.stages[static_cast<size_t>(r)].peak_activations,
                    std::min(microbatches, stages - r + 2));
      }
}

// The last stage with the whole head is what all wait for: M (F + B) (1 + head) and the way there
// and back. Divided, the step is near to the bound that the work of a stage sets.
TEST(Replay, TheVocabularyOverTheStagesTakesTheLoadOffTheLast) {
  for (const auto& [stages, microbatches] :
       std::vector<std::array<int, 2>>{{2, 8}, {4, 16}, {8, 32}}) {
    for (const double head : {0.3, 1.0, 2.4}) {
      const ScheduleShape divided = vocab_shape(stages, microbatches, head);
      const double bound = microbatches * (3 + 3 * head / stages) + (stages - 1) * 3;
      const double time = makespan(ScheduleKind::k1F1B, divided);
      EXPECT_GE(time, bound - 1e-9);
      EXPECT_LE(time, 1.05 * bound) << stages << " stages, head " << head;
      ScheduleShape whole = shape_of(stages, 1, microbatches);
      whole.costs.passes.assign(static_cast<size_t>(stages), {PassCosts{}});
      whole.costs.passes.back() = {PassCosts{1 + head, 1 + head, 1 + head}};
      EXPECT_GE(makespan(ScheduleKind::k1F1B, whole), microbatches * 3 * (1 + head));
      EXPECT_LT(time, makespan(ScheduleKind::k1F1B, whole));
    }
  }
}

TEST(Replay, FindsWhatIsWrongWithTheVocabulary) {
  const ScheduleShape shape = vocab_shape(3, 4, 1);
  const Schedule good = make_schedule(ScheduleKind::k1F1B, shape);
  const auto error_after = [&](int stage, const auto& change) {
    Schedule bad = good;
    change(bad.stages[static_cast<size_t>(stage)]);
    return error_of([&] { replay(bad); });
  };
  const auto position = [](const std::vector<Action>& actions, Kind kind, int microbatch) {
    return std::find(actions.begin(), actions.end(), Action{kind, 0, microbatch}) - actions.begin();
  };
  EXPECT_THAT(error_after(1, [&](auto& a) { a.erase(a.begin() + position(a, Kind::kLoss, 2)); }),
              HasSubstr("stage 1 leaves out L0.2"));
  EXPECT_THAT(error_after(0, [&](auto& a) { a.erase(a.begin() + position(a, Kind::kHead, 3)); }),
              HasSubstr("comes before its logits"));
  EXPECT_THAT(error_after(0, [&](auto& a) { a.push_back({Kind::kHead, 0, 1}); }),
              HasSubstr("is done twice"));
  // The last stage's gradient waits for everybody's loss.
  EXPECT_THAT(error_after(2,
                          [&](auto& a) {
                            std::swap(a[position(a, Kind::kLoss, 0)],
                                      a[position(a, Kind::kBackward, 0)]);
                          }),
              HasSubstr("deadlocks: "));
  // Stages whose calls come in other orders would wait for each other for ever where a call holds
  // up who makes it.
  Schedule crossed = good;
  std::vector<Action>& actions = crossed.stages[0];
  std::swap(actions[position(actions, Kind::kLoss, 0)], actions[position(actions, Kind::kHead, 1)]);
  replay(crossed);
  EXPECT_THAT(error_of([&] { replay(crossed, {}, TransferMode::kBlocking); }),
              HasSubstr("for all stages"));
}

// Bubble of 1F1B: (P-1)(F + I + W); of ZB-H1: (P-1)(F + I - W), Qi et al. 2023 table 1.
TEST(Replay, ZeroBubbleH1HasAThirdOfTheBubble) {
  for (const PassCosts& costs : {PassCosts{1, 1, 1}, PassCosts{1, 1.2, 0.8}}) {
    for (const int stages : {2, 4, 8}) {
      ScheduleShape shape = shape_of(stages, 1, 4 * stages);
      shape.costs.whole_stage = costs;
      const double work =
          4 * stages * (costs.forward + costs.backward_input + costs.backward_weight);
      const double sum = costs.forward + costs.backward_input;
      EXPECT_NEAR(makespan(ScheduleKind::k1F1B, shape),
                  work + (stages - 1) * (sum + costs.backward_weight), 1e-9);
      EXPECT_NEAR(makespan(ScheduleKind::kZeroBubbleH1, shape),
                  work + (stages - 1) * (sum - costs.backward_weight), 1e-9);
    }
  }
}

// No schedule over these stages can end before the last stage has waited for the first activation
// and done its work.
double least_makespan(const ScheduleShape& shape) {
  const PassCosts& c = shape.costs.whole_stage;
  return shape.num_microbatches * (c.forward + c.backward_input + c.backward_weight) +
         (shape.num_stages - 1) * (c.forward / shape.num_chunks + shape.costs.transfer);
}

TEST(Replay, TheAutomaticScheduleUsesMemoryToHideWhatH1CannotHide) {
  ScheduleShape shape = shape_of(8, 1, 32);
  shape.costs.whole_stage = {1, 1.2, 0.8};
  EXPECT_GT(makespan(ScheduleKind::kZeroBubbleH1, shape), least_makespan(shape) + 1);
  EXPECT_NEAR(makespan(ScheduleKind::kZeroBubbleAuto, shape), least_makespan(shape), 1e-9);
  shape.costs.transfer = 0.2;
  EXPECT_NEAR(makespan(ScheduleKind::kZeroBubbleAuto, shape), least_makespan(shape), 1e-9);
  // With 1F1B's memory it can do no better than H1 here, and what it may hold is kept to.
  for (const int limit : {8, 10, 12, 16}) {
    shape.max_in_flight = limit;
    const Schedule s = make_schedule(ScheduleKind::kZeroBubbleAuto, shape);
    const Replay r = replay(s, shape.costs);
    EXPECT_LE(r.peak_activations(), limit);
    EXPECT_LE(r.makespan, makespan(ScheduleKind::kZeroBubbleH1, shape));
  }
}

TEST(Replay, ZeroBubbleVIsIdleOnlyUntilTheFirstActivationComes) {
  for (const int stages : {2, 4, 8}) {
    const ScheduleShape shape = shape_of(stages, 2, 3 * stages);
    EXPECT_NEAR(makespan(ScheduleKind::kZeroBubbleV, shape), least_makespan(shape), 1e-9);
  }
}

// The micro-batches of a chunk are taken in order by every kind of pass; B is both I and W.
void expect_ascending(const Schedule& schedule) {
  for (const std::vector<Action>& list : schedule.stages) {
    std::map<std::pair<Kind, int>, int> next;
    for (const Action& a : list) {
      const bool both = a.kind == Kind::kBackward;
      EXPECT_EQ(a.microbatch, (next[{both ? Kind::kBackwardInput : a.kind, a.chunk}]++))
          << to_string(a);
      if (both) {
        EXPECT_EQ(a.microbatch, (next[{Kind::kBackwardWeight, a.chunk}]++)) << to_string(a);
      }
    }
  }
}

// Hundreds of shapes: every schedule ends, does everything once, in both modes, and the zero-bubble
// ones beat 1F1B.
TEST(Replay, RandomShapes) {
  std::mt19937 random(20240521);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int built = 0, refused = 0;
  for (int round = 0; round < 400; ++round) {
    const int stages = draw(1, 8), chunks = draw(1, 4), microbatches = draw(1, 20);
    ScheduleShape shape =
        shape_of(stages, chunks, microbatches, draw(0, 2) == 0 ? 0 : draw(stages, 2 * stages));
    // Deferring must not wait for the last micro-batch's transfers alone: costs near those of a
    // transformer.
    shape.costs.whole_stage = {1, 0.9 + 0.1 * draw(0, 4), 0.7 + 0.1 * draw(0, 3)};
    shape.costs.transfer = 0.05 * draw(0, 2);
    SCOPED_TRACE(cat("stages ", stages, " chunks ", chunks, " micro-batches ", microbatches,
                     " group ", shape.group_size));
    const bool interleaved = chunks > 1 && stages > 1;
    const int group = shape.group_size == 0 ? stages : shape.group_size;
    const bool legal =
        !interleaved || (microbatches >= stages && group <= microbatches &&
                         (microbatches % group == 0 || microbatches % group >= stages));
    for (const ScheduleKind kind : kAllKinds) {
      const bool looped = schedule_placement(kind) == ChunkPlacement::kLooped;
      if (looped ? !legal : chunks != 2) {
        EXPECT_THROW(make_schedule(kind, shape), UsageError);
        ++refused;
        continue;
      }
      const Schedule s = make_schedule(kind, shape);
      const Replay r = replay(s, shape.costs);
      const Replay on_demand = replay(s, shape.costs, TransferMode::kOnDemand);
      EXPECT_LE(r.makespan, on_demand.makespan + 1e-9);
      EXPECT_GE(r.makespan, least_makespan(shape) - 1e-9);
      for (const ReplayedStage& stage : r.stages) {
        EXPECT_LE(stage.peak_activations, chunks * microbatches);
        for (size_t i = 1; i < stage.actions.size(); ++i)
          EXPECT_GE(stage.actions[i].start, stage.actions[i - 1].end - 1e-12);
      }
      expect_ascending(s);
      ++built;
    }
    if (stages > 1 && legal) {
      EXPECT_LT(makespan(ScheduleKind::kZeroBubbleH1, shape), makespan(ScheduleKind::k1F1B, shape));
      EXPECT_LE(makespan(ScheduleKind::kZeroBubbleAuto, shape),
                makespan(ScheduleKind::kZeroBubbleH1, shape) + 1e-9);
    }
  }
  EXPECT_GT(built, 600);
  EXPECT_GT(refused, 200);
}

// -- what is wrong is found

std::string replay_error(const Schedule& schedule) {
  return error_of([&] { replay(schedule); });
}

TEST(Replay, ADeadlockNamesWhoWaitsForWhat) {
  Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 2));
  // Stage 0 wants its first gradient before it has sent the second activation; stage 1 wants that
  // one first.
  s.stages[0] = {{Kind::kForward, 0, 0},
                 {Kind::kBackward, 0, 0},
                 {Kind::kForward, 0, 1},
                 {Kind::kBackward, 0, 1}};
  s.stages[1] = {{Kind::kForward, 0, 0},
                 {Kind::kForward, 0, 1},
                 {Kind::kBackward, 0, 0},
                 {Kind::kBackward, 0, 1}};
  EXPECT_THAT(
      replay_error(s),
      HasSubstr("schedule 1f1b deadlocks: stage 0 waits at action 1 (B0.0) for B0.0 of stage 1; "
                "stage 1 waits at action 1 (F0.1) for F0.1 of stage 0"));
}

TEST(Replay, EveryFaultOfAListIsNamed) {
  const Schedule whole = make_schedule(ScheduleKind::kZeroBubbleH1, shape_of(3, 1, 2));
  const auto with = [&](const auto& change) {
    Schedule s = whole;
    change(s.stages[1]);
    return replay_error(s);
  };
  using List = std::vector<Action>;
  ASSERT_EQ(to_string(whole.stages[1]), "F0.0 F0.1 I0.0 I0.1 W0.0 W0.1");
  EXPECT_EQ(with([](List&) {}), "");
  EXPECT_THAT(with([](List& list) { std::swap(list[1], list[3]); }),
              HasSubstr("stage 1, action 1 (I0.1) comes before its forward pass"));
  EXPECT_THAT(with([](List& list) { std::swap(list[3], list[5]); }),
              HasSubstr("stage 1, action 3 (W0.1) comes before its input gradient"));
  EXPECT_THAT(with([](List& list) { list[1] = list[0]; }),
              HasSubstr("stage 1, action 1 (F0.0) is done twice"));
  EXPECT_THAT(with([](List& list) { list.pop_back(); }), HasSubstr("stage 1 leaves out W0.1"));
  EXPECT_THAT(with([](List& list) { list.resize(2); }), HasSubstr("stage 1 leaves out B0.0"));
  EXPECT_THAT(with([](List& list) { list.clear(); }), HasSubstr("stage 1 leaves out F0.0"));
  EXPECT_THAT(with([](List& list) { list[0].microbatch = 2; }),
              HasSubstr("(F0.2) is outside of 1 chunks and 2 micro-batches"));
  Schedule forward_only = whole;
  forward_only.forward_only = true;
  EXPECT_THAT(replay_error(forward_only), HasSubstr("runs B0.0 in a forward-only schedule"));
}

// Any two neighbours of a list exchanged: either the replay still holds, or it says why not; it
// never hangs.
TEST(Replay, ExchangedActionsAreEitherLegalOrFound) {
  int legal = 0, found = 0;
  for (const ScheduleKind kind : kAllKinds) {
    const Schedule whole = make_schedule(kind, shape_of(3, 2, 6));
    for (size_t r = 0; r < whole.stages.size(); ++r) {
      for (size_t i = 0; i + 1 < whole.stages[r].size(); ++i) {
        Schedule s = whole;
        std::swap(s.stages[r][i], s.stages[r][i + 1]);
        (replay_error(s).empty() ? legal : found)++;
      }
    }
  }
  EXPECT_GT(legal, 50);
  EXPECT_GT(found, 50);
}

TEST(Replay, CostsMayDifferByStageAndChunk) {
  const Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 1));
  ScheduleCosts costs;
  costs.passes = {{{1, 2, 3}}, {{4, 5, 6}}};
  costs.transfer = 0.5;
  const Replay r = replay(s, costs);
  EXPECT_DOUBLE_EQ(r.makespan, 1 + 0.5 + 4 + 11 + 0.5 + 5);
  EXPECT_DOUBLE_EQ(r.stages[0].busy, 6);
  EXPECT_DOUBLE_EQ(r.stages[1].busy, 15);
  EXPECT_DOUBLE_EQ(r.bubble_fraction, 1 - 21 / (2 * r.makespan));
}

// Transfers take time only where a stage waits for them.
TEST(Replay, OverlapHidesTransfers) {
  const Schedule s = make_schedule(ScheduleKind::kZeroBubbleAuto, [] {
    ScheduleShape shape = shape_of(4, 1, 32);
    shape.costs.transfer = 0.25;
    return shape;
  }());
  ScheduleCosts costs;
  costs.transfer = 0.25;
  EXPECT_LT(replay(s, costs).makespan, replay(s, costs, TransferMode::kOnDemand).makespan - 1);
}

}  // namespace
}  // namespace megatron
