#include "megatron/reporting/timers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace megatron {
namespace {

TEST(Timers, CountOnlyUpToTheLevel) {
  int waits = 0;
  Timers timers(1, [&] { ++waits; });
  {
    ScopedTimer outer(timers, "optimizer", 1);
    ScopedTimer inner(timers, "forward-compute", 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  const auto times = timers.milliseconds();
  ASSERT_EQ(times.size(), 1u);
  EXPECT_EQ(times[0].first, "optimizer");
  EXPECT_GE(times[0].second, 2.0);
  EXPECT_EQ(waits, 2);
  timers.reset();
  EXPECT_EQ(timers.milliseconds()[0].second, 0.0);
}

TEST(Timers, ListenerSeesEveryRegion) {
  Timers timers(0);
  std::vector<std::string> seen;
  timers.set_listener([&](const std::string& name, auto begin, auto end) {
    EXPECT_LE(begin, end);
    seen.push_back(name);
  });
  for (int i = 0; i < 2; ++i) ScopedTimer timer(timers, "step", 0);
  EXPECT_EQ(seen, (std::vector<std::string>{"step", "step"}));
}

TEST(Timers, Report) {
  const std::vector<std::string> names = {"optimizer"};
  const std::vector<std::vector<double>> values = {{10.0}, {30.0}};
  EXPECT_EQ(
      format_timers(names, values, TimingLogOption::kMax, 10),
      "max time across ranks (ms):\n    optimizer ......................................: 3.00");
  EXPECT_EQ(format_timers(names, values, TimingLogOption::kMinMax, 1),
            "(min, max) time across ranks (ms):\n    optimizer "
            "......................................: (10.00, 30.00)");
  EXPECT_EQ(format_timers(names, values, TimingLogOption::kAll, 1),
            "times across ranks (ms):\n  optimizer:\n     rank  0: 10.00\n     rank  1: 30.00");
  // A rank that has no such timer is no minimum.
  EXPECT_EQ(format_timers(names, {{10.0}, {0.0}, {30.0}}, TimingLogOption::kMinMax, 1),
            "(min, max) time across ranks (ms):\n    optimizer "
            "......................................: (10.00, 30.00)");
  EXPECT_EQ(format_timers(names, {{10.0}, {0.0}, {30.0}}, TimingLogOption::kAll, 1),
            "times across ranks (ms):\n  optimizer:\n     rank  0: 10.00\n     rank  2: 30.00");
}

TEST(Timers, OfAllRanks) {
  Timers timers(1);
  {
    ScopedTimer timer(timers, "save checkpoint", 1);
  }
  EXPECT_THAT(timers_to_text(timers), testing::StartsWith("save checkpoint\t"));
  const RankTimers all =
      timers_from_texts({"optimizer\t1.5\n", "", "forward\t2\noptimizer\t3.25\n"});
  EXPECT_THAT(all.names, testing::ElementsAre("optimizer", "forward"));
  EXPECT_THAT(all.values,
              testing::ElementsAre(testing::ElementsAre(1.5, 0), testing::ElementsAre(0, 0),
                                   testing::ElementsAre(3.25, 2)));
  EXPECT_EQ(all.longest(0), 3.25);
  EXPECT_EQ(timers_from_texts({timers_to_text(timers)}).values[0][0],
            timers.milliseconds()[0].second);
}

}  // namespace
}  // namespace megatron
