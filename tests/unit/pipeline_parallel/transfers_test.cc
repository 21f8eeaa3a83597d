#include "megatron/pipeline_parallel/transfers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "testing.h"

namespace megatron {
namespace {

using Kind = Action::Kind;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

TEST(Transfers, LinksFollowThePlacement) {
  EXPECT_THAT(transfer_links(make_schedule(ScheduleKind::k1F1B, shape_of(3, 1, 3))),
              ElementsAre(Pair(0, 1), Pair(1, 0), Pair(1, 2), Pair(2, 1)));
  // Interleaved: the last stage hands on to the first.
  EXPECT_THAT(transfer_links(make_schedule(ScheduleKind::k1F1B, shape_of(3, 2, 3))),
              ElementsAre(Pair(0, 1), Pair(0, 2), Pair(1, 0), Pair(1, 2), Pair(2, 0), Pair(2, 1)));
  // V: neighbours only.
  EXPECT_THAT(transfer_links(make_schedule(ScheduleKind::kZeroBubbleV, shape_of(3, 2, 3))),
              ElementsAre(Pair(0, 1), Pair(1, 0), Pair(1, 2), Pair(2, 1)));
  EXPECT_TRUE(transfer_links(make_schedule(ScheduleKind::k1F1B, shape_of(1, 1, 3))).empty());
}

TEST(Transfers, OfASmallPipeline) {
  const Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 2));
  ASSERT_EQ(to_string(s.stages[0]), "F0.0 F0.1 B0.0 B0.1");
  ASSERT_EQ(to_string(s.stages[1]), "F0.0 B0.0 F0.1 B0.1");
  const auto plan = plan_transfers(s);
  const Transfer none;
  EXPECT_EQ(plan[0][0].receive, none);
  EXPECT_EQ(plan[0][0].send, (Transfer{1, 0, 0}));
  EXPECT_EQ(plan[0][1].send, (Transfer{1, 1, 2}));
  EXPECT_EQ(plan[0][2].receive, (Transfer{1, 0, 1}));
  EXPECT_EQ(plan[0][3].receive, (Transfer{1, 1, 3}));
  EXPECT_EQ(plan[0][3].send, none);
  EXPECT_EQ(plan[1][1].receive, none);
  EXPECT_EQ(plan[1][1].send, (Transfer{0, 0, 2}));
  // B0.0 answers F0.0.
  EXPECT_EQ(plan[0][2].needs, 1);
  EXPECT_EQ(plan[0][3].needs, 2);
  EXPECT_EQ(plan[1][2].needs, 0);
  EXPECT_EQ(early_receiver(plan[0], 0, 0), 4u);
  EXPECT_EQ(early_receiver(plan[0], 0, 1), 2u);
  EXPECT_EQ(early_receiver(plan[0], 0, 2), 3u);
  EXPECT_EQ(early_receiver(plan[1], 1, 0), 2u);
  EXPECT_EQ(early_receiver(plan[1], 1, 3), 4u);
}

TEST(Transfers, NeighbouringSegmentsOfOneStageAreHandedOver) {
  const Schedule s = make_schedule(ScheduleKind::kZeroBubbleV, shape_of(2, 2, 4));
  const auto plan = plan_transfers(s);
  ASSERT_EQ(s.stages[1][0], (Action{Kind::kForward, 0, 0}));
  EXPECT_EQ(plan[1][0].send.peer, 1);
  const Action& user = s.stages[1][static_cast<size_t>(plan[1][0].send.peer_action)];
  EXPECT_EQ(user, (Action{Kind::kForward, 1, 0}));
}

// Both ends of each message name each other, and the messages of a link are numbered in the
// sender's order.
TEST(Transfers, BothEndsAgree) {
  for (const ScheduleKind kind : kAllKinds) {
    const Schedule s = make_schedule(kind, shape_of(4, 2, 8));
    const auto plan = plan_transfers(s);
    std::map<std::pair<int, int>, int> sent;
    int messages = 0;
    for (int stage = 0; stage < s.num_stages; ++stage) {
      for (size_t i = 0; i < plan[static_cast<size_t>(stage)].size(); ++i) {
        const Transfer& send = plan[static_cast<size_t>(stage)][i].send;
        if (!send.any()) continue;
        ++messages;
        EXPECT_EQ(send.sequence, (sent[{stage, send.peer}]++));
        const Transfer& receive =
            plan[static_cast<size_t>(send.peer)][static_cast<size_t>(send.peer_action)].receive;
        EXPECT_EQ(receive, (Transfer{stage, send.sequence, static_cast<int>(i)}));
      }
    }
    EXPECT_EQ(messages, 2 * 8 * (s.num_segments() - 1));
  }
}

// Whether all stages come to their ends if the computation of one action begins only when all
// posted receives of its stage have got their messages. `early`: the receive that is posted before
// an action computes.
template <class Early>
bool ends_if_one_waits(const std::vector<std::vector<ActionTransfers>>& plan, size_t waiting_stage,
                       size_t waiting_action, const Early& early) {
  std::vector<size_t> done(plan.size(), 0);
  const auto has_come = [&](const Transfer& receive) {
    return !receive.any() ||
           done[static_cast<size_t>(receive.peer)] > static_cast<size_t>(receive.peer_action);
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < plan.size(); ++r) {
      const size_t i = done[r];
      if (i == plan[r].size() || !has_come(plan[r][i].receive)) continue;
      const size_t posted = early(plan[r], static_cast<int>(r), i);
      const bool waits = r == waiting_stage && i == waiting_action && posted < plan[r].size();
      if (waits && !has_come(plan[r][posted].receive)) continue;
      ++done[r];
      moved = true;
    }
  }
  for (size_t r = 0; r < plan.size(); ++r)
    if (done[r] < plan[r].size()) return false;
  return true;
}

TEST(Transfers, NoComputationWaitsForItsOwnResult) {
  const auto any = [](const std::vector<ActionTransfers>& actions, int stage, size_t current) {
    size_t next = current + 1;
    while (next < actions.size() &&
           (!actions[next].receive.any() || actions[next].receive.peer == stage))
      ++next;
    return next;
  };
  const auto always = [](const std::vector<std::vector<ActionTransfers>>& plan, const auto& early) {
    for (size_t stage = 0; stage < plan.size(); ++stage)
      for (size_t i = 0; i < plan[stage].size(); ++i)
        if (!ends_if_one_waits(plan, stage, i, early)) return false;
    return true;
  };
  EXPECT_FALSE(always(plan_transfers(make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 4))), any));
  for (const ScheduleKind kind : kAllKinds)
    for (const int stages : {2, 3, 4})
      for (const int chunks : {1, 2, 3}) {
        if (kind == ScheduleKind::kZeroBubbleV && chunks != 2) continue;
        if (chunks > 1 && kind != ScheduleKind::k1F1B && kind != ScheduleKind::kZeroBubbleV)
          continue;
        for (const int microbatches : {1, 2, 3, 4, 12}) {
          if (chunks > 1 && microbatches % stages != 0) continue;
          const Schedule s = make_schedule(kind, shape_of(stages, chunks, microbatches));
          EXPECT_TRUE(always(plan_transfers(s), early_receiver))
              << s.name << " " << stages << " " << chunks << " " << microbatches;
        }
      }
}

TEST(Transfers, TheSteadyStatePostsEveryReceiveEarly) {
  const Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(4, 1, 8));
  const auto plan = plan_transfers(s);
  for (const int stage : {1, 2})  // every action receives
    for (size_t i = static_cast<size_t>(3 - stage); i + 1 < plan[1].size(); ++i)
      EXPECT_EQ(early_receiver(plan[static_cast<size_t>(stage)], stage, i), i + 1) << stage;
}

TEST(Transfers, AListWithAHoleIsRefused) {
  Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 2));
  s.stages[1].pop_back();
  EXPECT_THAT(error_of([&] { plan_transfers(s); }),
              HasSubstr("no action produces the input of B0.1 on stage 0 of the schedule 1f1b"));
  s = make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 2));
  s.stages[0].pop_back();
  EXPECT_THAT(error_of([&] { plan_transfers(s); }),
              HasSubstr("no action uses the result of B0.1 on stage 1 of the schedule 1f1b"));
}

}  // namespace
}  // namespace megatron
