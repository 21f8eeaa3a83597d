#include "megatron/training/run_origin.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

using nlohmann::ordered_json;

TEST(RunOrigin, RanksOfOneHostAreOneRow) {
  const std::vector<RankHost> ranks = {{"a", "H100", "535.1", 64},
                                       {"a", "H100", "535.1", 64},
                                       {"b", "H100", "550.2", 64},
                                       {"b", "H200", "550.2", 64},
                                       {"a", "H100", "535.1", 64}};
  const auto hosts = ordered_json::parse(hosts_json(ranks));
  ASSERT_EQ(hosts.size(), 4u);
  EXPECT_EQ(hosts[0].dump(),
            R"({"host":"a","ranks":"0-1","device":"H100","driver":"535.1","cores":64})");
  EXPECT_EQ(hosts[1]["ranks"], "2");
  EXPECT_EQ(hosts[2]["device"], "H200");
  EXPECT_EQ(hosts[3]["ranks"], "4") << "in rank order";
}

TEST(RunOrigin, TheFirstRankHearsOfAll) {
  ThreadAgreement::Room room(3);
  std::vector<std::vector<RankHost>> heard(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadAgreement agreement(room, rank);
      Job job;
      job.agreement = &agreement;
      heard[static_cast<size_t>(rank)] =
          gather_hosts(job, {"host \"" + std::to_string(rank) + "\"", "cpu", "", rank});
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(heard[0].size(), 3u);
  EXPECT_EQ(heard[0][2].host, "host \"2\"");
  EXPECT_EQ(heard[0][1].cores, 1);
  EXPECT_TRUE(heard[1].empty() && heard[2].empty());
}

TEST(RunOrigin, StagesOfAStartAreInOrder) {
  StartClock clock("program");
  EXPECT_EQ(clock.stage("data",
                        [] {
                          std::this_thread::sleep_for(std::chrono::milliseconds(20));
                          return 5;
                        }),
            5);
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  clock.end_stage("first step");
  const auto seconds = ordered_json::parse(clock.json());
  EXPECT_EQ(seconds.size(), 3u);
  EXPECT_EQ(seconds.begin().key(), "program");
  EXPECT_GT(seconds["program"].get<double>(), 0.0) << "since the process began";
  EXPECT_GE(seconds["data"].get<double>(), 0.02);
  EXPECT_GE(seconds["first step"].get<double>(), 0.01);
}

}  // namespace
}  // namespace megatron
