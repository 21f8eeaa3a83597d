#include "megatron/pipeline_parallel/transfers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

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
  EXPECT_EQ(next_receiver(plan[0], 0, 0), 2u);
  EXPECT_EQ(next_receiver(plan[1], 1, 3), 4u);
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
