#include "megatron/pipeline_parallel/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/pipeline_parallel/replay.h"
#include "testing.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using Kind = Action::Kind;

std::vector<Action> passes(const std::vector<Action>& actions, Kind kind) {
  std::vector<Action> out;
  for (const Action& a : actions)
    if (a.kind == kind) out.push_back(a);
  return out;
}

int leading_forwards(const std::vector<Action>& actions) {
  const auto is_forward = [](const Action& a) { return a.kind == Kind::kForward; };
  return static_cast<int>(std::find_if_not(actions.begin(), actions.end(), is_forward) -
                          actions.begin());
}

TEST(Schedule, OneForwardOneBackwardIsWhatPeopleDraw) {
  const Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(4, 1, 5));
  EXPECT_EQ(s.name, "1f1b");
  EXPECT_EQ(to_string(s.stages[0]), "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4");
  EXPECT_EQ(to_string(s.stages[1]), "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 B0.3 B0.4");
  EXPECT_EQ(to_string(s.stages[3]), "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 F0.4 B0.4");
}

// Warm-up = min(PP - r - 1, M), then one forward and one backward by turns; both walk the
// micro-batches in order.
TEST(Schedule, OneForwardOneBackwardWarmUp) {
  for (int stages = 1; stages <= 8; ++stages) {
    for (int microbatches = 1; microbatches <= 10; ++microbatches) {
      const Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(stages, 1, microbatches));
      for (int r = 0; r < stages; ++r) {
        const std::vector<Action>& list = s.stages[static_cast<size_t>(r)];
        const int warm_up = std::min(stages - r - 1, microbatches);
        EXPECT_EQ(leading_forwards(list), std::min(warm_up + 1, microbatches));
        for (int k = 0; k < microbatches - warm_up; ++k) {
          EXPECT_EQ(list[static_cast<size_t>(warm_up + 2 * k)],
                    (Action{Kind::kForward, 0, warm_up + k}));
          EXPECT_EQ(list[static_cast<size_t>(warm_up + 2 * k + 1)],
                    (Action{Kind::kBackward, 0, k}));
        }
      }
    }
  }
}

// Megatron's table for 5 micro-batches, 2 chunks and groups of 3.
TEST(Schedule, InterleavedOrderIsMegatrons) {
  const Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(2, 2, 5, 3));
  const std::vector<std::pair<int, int>> table = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1},
                                                  {2, 1}, {3, 0}, {4, 0}, {3, 1}, {4, 1}};
  std::vector<Action> forward, backward;
  for (const auto& [microbatch, chunk] : table) {
    forward.push_back({Kind::kForward, chunk, microbatch});
    backward.push_back({Kind::kBackward, 1 - chunk, microbatch});
  }
  for (const std::vector<Action>& list : s.stages) {
    EXPECT_EQ(passes(list, Kind::kForward), forward);
    EXPECT_EQ(passes(list, Kind::kBackward), backward);
  }
}

// Warm-up = min(2 (PP - r - 1) + (V - 1) G, M V) virtual steps.
TEST(Schedule, InterleavedWarmUp) {
  for (const auto& [stages, chunks, microbatches, group] : std::vector<std::array<int, 4>>{
           {4, 2, 8, 4}, {4, 2, 8, 8}, {2, 3, 6, 3}, {2, 2, 5, 3}, {4, 4, 4, 4}, {3, 2, 7, 4}}) {
    const Schedule s =
        make_schedule(ScheduleKind::k1F1B, shape_of(stages, chunks, microbatches, group));
    for (int r = 0; r < stages; ++r) {
      const int total = chunks * microbatches;
      const int warm_up = std::min(2 * (stages - r - 1) + (chunks - 1) * group, total);
      EXPECT_EQ(leading_forwards(s.stages[static_cast<size_t>(r)]), std::min(warm_up + 1, total));
    }
  }
}

TEST(Schedule, PlacementsNumberEverySegmentOnce) {
  for (const ChunkPlacement placement : {ChunkPlacement::kLooped, ChunkPlacement::kVShaped}) {
    for (int segment = 0; segment < 8; ++segment)
      EXPECT_EQ(segment_of(placement, 4, place_of(placement, 4, segment)), segment);
  }
  EXPECT_EQ(place_of(ChunkPlacement::kLooped, 4, 4), (SegmentPlace{0, 1}));
  EXPECT_EQ(place_of(ChunkPlacement::kVShaped, 4, 3), (SegmentPlace{3, 0}));
  EXPECT_EQ(place_of(ChunkPlacement::kVShaped, 4, 4), (SegmentPlace{3, 1}));
  EXPECT_EQ(place_of(ChunkPlacement::kVShaped, 4, 7), (SegmentPlace{0, 1}));
}

TEST(Schedule, ZeroBubbleH1DefersMoreTheFurtherDown) {
  const Schedule s = make_schedule(ScheduleKind::kZeroBubbleH1, shape_of(3, 1, 4));
  // Nobody waits for the first segment's input gradient: its two halves are one pass.
  EXPECT_EQ(to_string(s.stages[0]), "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3");
  EXPECT_EQ(to_string(s.stages[1]), "F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 F0.3 I0.2 W0.1 I0.3 W0.2 W0.3");
  EXPECT_EQ(to_string(s.stages[2]), "F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 F0.3 I0.3 W0.1 W0.2 W0.3");
}

TEST(Schedule, EveryKindHasANameAndTheNameItsPlacement) {
  const auto names = schedule_names();
  ASSERT_EQ(names.size(), std::size(kAllKinds));
  for (const ScheduleKind kind : kAllKinds) {
    const Schedule s = make_schedule(kind, shape_of(2, 2, 4));
    EXPECT_EQ(s.name, names[static_cast<size_t>(kind)]);
    EXPECT_EQ(s.placement, schedule_placement(kind));
  }
  EXPECT_EQ(names[static_cast<size_t>(ScheduleKind::kZeroBubbleV)], "zb-v");
}

TEST(Schedule, TheVocabularyOverTheStages) {
  ScheduleShape shape = shape_of(3, 1, 3);
  shape.vocab_parallel = true;
  const Schedule s = make_schedule(ScheduleKind::k1F1B, shape);
  EXPECT_EQ(to_string(s.stages[0]), "F0.0 F0.1 H0.0 F0.2 L0.0 H0.1 L0.1 H0.2 L0.2 B0.0 B0.1 B0.2");
  EXPECT_EQ(to_string(s.stages[1]), "F0.0 F0.1 H0.0 F0.2 L0.0 H0.1 L0.1 H0.2 B0.0 L0.2 B0.1 B0.2");
  EXPECT_EQ(to_string(s.stages[2]), "F0.0 F0.1 H0.0 F0.2 L0.0 H0.1 B0.0 L0.1 H0.2 B0.1 L0.2 B0.2");
  EXPECT_EQ(to_string(make_forward_schedule(ScheduleKind::k1F1B, shape).stages[2]),
            "F0.0 F0.1 H0.0 F0.2 L0.0 H0.1 L0.1 H0.2 L0.2");
}

TEST(Schedule, ForwardOnlyTakesAnyNumberOfMicrobatches) {
  for (const ScheduleKind kind : kAllKinds) {
    for (int microbatches = 1; microbatches <= 9; ++microbatches) {
      const Schedule s = make_forward_schedule(kind, shape_of(4, 2, microbatches));
      EXPECT_TRUE(s.forward_only);
      EXPECT_EQ(s.stages[0].size(), static_cast<size_t>(2 * microbatches));
      const Replay r = replay(s);
      EXPECT_EQ(r.stages[0].actions.size(), s.stages[0].size());
    }
  }
}

TEST(Schedule, WhatCannotBeBuiltIsRefusedWithTheNearestLegalValues) {
  const auto error = [](ScheduleKind kind, const ScheduleShape& shape) {
    return error_of([&] { make_schedule(kind, shape); });
  };
  const ScheduleKind one = ScheduleKind::k1F1B;
  EXPECT_EQ(error(one, shape_of(4, 2, 3)),
            "virtual pipeline stages need at least --pipeline-model-parallel-size 4 micro-batches, "
            "there are 3\n"
            "hint: raise --global-batch-size to 4 micro-batches per data-parallel rank");
  EXPECT_EQ(error(one, shape_of(4, 2, 10)),
            "10 micro-batches in groups of 4 leave a last group of 2, fewer than "
            "--pipeline-model-parallel-size 4\n"
            "hint: --microbatch-group-size-per-virtual-pipeline-stage 5, or 8 or 12 micro-batches");
  EXPECT_EQ(error(one, shape_of(4, 2, 8, 3)),
            "--microbatch-group-size-per-virtual-pipeline-stage 3 is not between "
            "--pipeline-model-parallel-size 4 and the 8 "
            "micro-batches of a step\nhint: the nearest legal value is 4");
  EXPECT_EQ(error(one, shape_of(4, 2, 8, 12)),
            "--microbatch-group-size-per-virtual-pipeline-stage 12 is not between "
            "--pipeline-model-parallel-size 4 and the 8 "
            "micro-batches of a step\nhint: the nearest legal value is 8");
  EXPECT_EQ(error(one, shape_of(4, 1, 0)),
            "a pipeline schedule over 0 micro-batches\nhint: at least 1");
  EXPECT_EQ(error(ScheduleKind::kZeroBubbleV, shape_of(4, 3, 8)),
            "--pipeline-schedule zb-v takes 2 virtual stages per pipeline rank, not 3\n"
            "hint: --num-virtual-stages-per-pipeline-rank 2");
  ScheduleShape tight = shape_of(4, 1, 8);
  tight.max_in_flight = 3;
  EXPECT_EQ(error(ScheduleKind::kZeroBubbleAuto, tight),
            "--zero-bubble-max-pending-backward 3 is less than the 4 that the first of 4 stages "
            "holds under "
            "1f1b\nhint: at least 4");
  ScheduleShape vocabulary = shape_of(4, 1, 8);
  vocabulary.vocab_parallel = true;
  EXPECT_EQ(error(ScheduleKind::kZeroBubbleH1, vocabulary),
            "--pipeline-vocab-parallel is built for --pipeline-schedule 1f1b without virtual "
            "stages, not for zb-h1 of 1 "
            "chunk per rank\nhint: leave one of them out");
  vocabulary.num_chunks = 2;
  EXPECT_THAT(error(one, vocabulary), testing::HasSubstr("not for 1f1b of 2 chunks per rank"));
  // M mod G may be anything from PP on.
  EXPECT_EQ(error(one, shape_of(2, 2, 5, 3)), "");
}

}  // namespace
}  // namespace megatron
