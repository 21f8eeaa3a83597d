#include "megatron/runtime/time_limit.h"

#include <gtest/gtest.h>

namespace megatron {
namespace {

TEST(TimeLimit, WithoutMeasurementsItIsTheLimit) {
  const TimeLimit limit(60, 1);
  EXPECT_FALSE(limit.reached(59.9, 0));
  EXPECT_TRUE(limit.reached(60, 0));
}

TEST(TimeLimit, LeavesRoomForATurnAndASave) {
  TimeLimit limit(100, 1);
  limit.add_turn(50);  // the first one warms up
  limit.add_turn(2);
  limit.add_turn(4);
  limit.add_turn(3);
  EXPECT_EQ(limit.longest_turn(), 4);
  // 1.25 * (4 + 12) = 20
  EXPECT_FALSE(limit.reached(79.9, 12));
  EXPECT_TRUE(limit.reached(80, 12));
}

TEST(TimeLimit, SeveralRanksStopSomeTurnsAfterTheDecision) {
  TimeLimit limit(100, 3);
  limit.add_turn(1);
  limit.add_turn(4);
  EXPECT_FALSE(limit.reached(84.9, 0));
  EXPECT_TRUE(limit.reached(85, 0));
}

TEST(TimeLimit, ALimitThatIsTooShortStopsAtOnce) {
  EXPECT_TRUE(TimeLimit(0, 1).reached(0, 0));
  EXPECT_TRUE(TimeLimit(60, 1).reached(0, 3600));
}

}  // namespace
}  // namespace megatron
