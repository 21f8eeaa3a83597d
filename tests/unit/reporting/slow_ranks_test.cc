#include "megatron/reporting/slow_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "megatron/reporting/section_means.h"

namespace megatron {
namespace {

SectionTimes times(double data, double forward, double backward, double communication,
                   double optimizer, double host) {
  return {data, forward, backward, communication, optimizer, host};
}

TEST(Sections, GoThroughThreeNumbers) {
  for (const SectionTimes& one :
       {times(1, 2, 3, 4, 5, 6), times(0.001, 1e6, 0, 2'000'000, 0, 0), times(0, 0, 0, 0, 0, 0)}) {
    SectionTimes back{};
    ASSERT_TRUE(unpack_times(pack_times(one).data(), back));
    for (int i = 0; i < kNumSections; ++i) EXPECT_NEAR(back[i], one[i], 0.0011) << i;
  }
  // The largest of one rank's numbers and the others' zeros are the rank's.
  for (const int64_t packed : pack_times(times(1e9, 1e9, 1e9, 1e9, 1e9, 1e9))) EXPECT_GT(packed, 0);
  const int64_t nothing[kPackedTimes] = {};
  SectionTimes back{};
  EXPECT_FALSE(unpack_times(nothing, back));
  EXPECT_EQ(busy_time(times(1, 2, 4, 100, 8, 16)), 31);
}

// Reports of steps 1 to `steps`, with `change` applied to what every rank takes.
std::optional<SlowRank> after(int ranks, int steps,
                              const std::function<void(int step, int rank, SectionTimes&)>& change,
                              std::vector<int> groups = {}) {
  if (groups.empty()) groups.assign(static_cast<size_t>(ranks), 0);
  SlowRanks slow(groups);
  std::optional<SlowRank> found;
  for (int step = 1; step <= steps; ++step) {
    for (int rank = 0; rank < ranks; ++rank) {
      SectionTimes one = times(50, 60, 120, 10, 20, 50);
      change(step, rank, one);
      slow.add(step, rank, one);
    }
    found = slow.find(step);
  }
  return found;
}

TEST(SlowRanks, NamesRankAndSection) {
  for (const int ranks : {2, 3, 4, 9}) {
    for (const Section section :
         {Section::kData, Section::kForward, Section::kBackward, Section::kHost}) {
      const auto found = after(ranks, 16, [&](int, int rank, SectionTimes& one) {
        if (rank == 1) one[static_cast<int>(section)] *= 1.2;
        if (rank != 1) one[static_cast<int>(Section::kCommunication)] += 20;  // they wait for it
      });
      ASSERT_TRUE(found) << section_name(section) << " of " << ranks;
      EXPECT_EQ(found->rank, 1);
      EXPECT_EQ(found->section, section);
      EXPECT_EQ(found->num_peers, ranks - 1);
      EXPECT_NEAR(found->milliseconds / found->peer_milliseconds, 1.2, 1e-9);
    }
  }
  const auto found = after(4, 16, [](int, int rank, SectionTimes& one) {
    if (rank == 2) one[static_cast<int>(Section::kBackward)] = 150;
  });
  EXPECT_EQ(to_string(*found),
            "rank 2 is slow: its backward takes 150.0 ms a step, that of 3 peers 120.0 ms; apart "
            "from waiting for "
            "others a step takes it 330.0 ms, them 300.0 ms");
}

TEST(SlowRanks, NamesNobodyWithoutReason) {
  EXPECT_FALSE(after(4, 100, [](int, int, SectionTimes&) {}));
  // Before the window is full.
  EXPECT_FALSE(
      after(4, 15, [](int, int rank, SectionTimes& one) { one[1] += rank == 1 ? 50 : 0; }));
  // Waiting for others is no fault; nor is less than a tenth, than a fortieth of the step, or than
  // two milliseconds.
  EXPECT_FALSE(
      after(4, 16, [](int, int rank, SectionTimes& one) { one[3] += rank == 1 ? 500 : 0; }));
  EXPECT_FALSE(
      after(4, 16, [](int, int rank, SectionTimes& one) { one[2] += rank == 1 ? 11 : 0; }));
  EXPECT_FALSE(after(4, 16, [](int, int rank, SectionTimes& one) { one[4] += rank == 1 ? 7 : 0; }));
  EXPECT_FALSE(after(4, 16, [](int, int rank, SectionTimes& one) {
    for (double& time : one) time /= 100;
    one[4] += rank == 1 ? 1.9 : 0;
  }));
  // Few odd steps, however odd, or many in one half of the window alone.
  EXPECT_FALSE(after(4, 16, [](int step, int rank, SectionTimes& one) {
    one[1] += rank == 1 && step % 3 == 0 ? 1000 : 0;
  }));
  EXPECT_FALSE(after(4, 16, [](int step, int rank, SectionTimes& one) {
    one[1] += rank == 1 && step <= 8 ? 1000 : 0;
  }));
  // Stages do different work.
  EXPECT_FALSE(after(4, 16, [](int, int rank, SectionTimes& one) { one[1] += rank < 2 ? 40 : 0; },
                     {0, 0, 1, 1}));
  EXPECT_FALSE(
      after(2, 16, [](int, int rank, SectionTimes& one) { one[1] += rank == 0 ? 40 : 0; }, {0, 1}));
}

TEST(SlowRanks, OfSeveralTheSlowestAndOfAStageItsOwn) {
  const auto found = after(8, 20,
                           [](int, int rank, SectionTimes& one) {
                             one[1] += rank < 4 ? 100 : 0;  // a longer stage
                             if (rank == 5) one[2] += 30;
                             if (rank == 6) one[0] += 40;
                           },
                           {0, 0, 0, 0, 1, 1, 1, 1});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 6);
  EXPECT_EQ(found->section, Section::kData);
  EXPECT_EQ(found->num_peers, 3);
}

// A rank whose reports come every fourth step is judged by them; one that no longer reports is not.
TEST(SlowRanks, WorksWithFewReports) {
  SlowRanks slow({0, 0, 0});
  for (int step = 1; step <= 40; ++step) {
    for (int rank = 0; rank < 3; ++rank)
      if (step % 4 == rank && (rank != 2 || step < 20))
        slow.add(step, rank, times(0, rank == 1 ? 130 : 100, 100, 0, 0, 0));
    if (step >= 20) {
      ASSERT_TRUE(slow.find(step)) << step;
      EXPECT_EQ(slow.find(step)->rank, 1);
    }
  }
}

// Thousands of ranks take turns: the window grows until each has had its turns, and a slow one is
// named in the first round after that.
TEST(SlowRanks, ThousandsOfRanksHaveALongerWindow) {
  constexpr int kRanks = 4096, kRound = kRanks / kReportedRanks;
  for (const bool slow_one : {false, true}) {
    SlowRanks slow(std::vector<int>(kRanks, 0));
    EXPECT_EQ(slow.window(), 40);
    int64_t first = 0;
    for (int step = 1; step <= 48 && first == 0; ++step) {
      const int begin = (step - 1) % kRound * kReportedRanks;
      for (int rank = begin; rank < begin + kReportedRanks; ++rank) {
        // Each rank's first turn comes to nothing, as that of the first step does
        if (step <= kRound && rank % kReportedRanks < 100) continue;
        const bool is_slow = slow_one && rank == 4001;
        slow.add(step, rank, times(50, is_slow ? 72 : 60, 120, 10, 20, 50));
      }
      if (const std::optional<SlowRank> found = slow.find(step)) {
        EXPECT_EQ(found->rank, 4001);
        EXPECT_EQ(found->num_peers, kRanks - 1);
        first = step;
      }
    }
    EXPECT_EQ(first, slow_one ? 40 : 0);
  }
  EXPECT_EQ(SlowRanks(std::vector<int>(1536, 0)).window(), 16);
  EXPECT_EQ(SlowRanks(std::vector<int>(1537, 0)).window(), 20);
}

TEST(SectionMeans, EveryRankCountsAlike) {
  SectionMeans means;
  EXPECT_FALSE(means.take());
  means.add(0, times(1, 10, 20, 5, 0, 1));
  means.add(0, times(3, 20, 20, 5, 0, 1));
  means.add(3, times(8, 9, 20, 1, 0, 1));
  const auto all = means.take();
  ASSERT_TRUE(all);
  const auto of = [&](Section section) { return (*all)[static_cast<size_t>(section)]; };
  EXPECT_EQ(of(Section::kData).mean, 5);
  EXPECT_EQ(of(Section::kData).longest, 8);
  EXPECT_EQ(of(Section::kData).longest_rank, 3);
  EXPECT_EQ(of(Section::kForward).mean, 12);
  EXPECT_EQ(of(Section::kForward).longest, 15);
  EXPECT_EQ(of(Section::kForward).longest_rank, 0);
  EXPECT_EQ(of(Section::kBackward).longest_rank, 0) << "of even ranks the first";
  EXPECT_FALSE(means.take()) << "an interval without reports";
  means.add(3, times(1, 1, 1, 1, 1, 1));
  EXPECT_EQ((*means.take())[0].longest_rank, 3) << "who has not reported does not count";
}

// Noise of a few percent, and now and then a step that took twice as long, on 1,000 steps of four
// ranks.
TEST(SlowRanks, BearsNoise) {
  std::mt19937 random(7);
  std::normal_distribution<double> noise(1.0, 0.04);
  SlowRanks slow({0, 0, 0, 0});
  for (int step = 1; step <= 1000; ++step) {
    for (int rank = 0; rank < 4; ++rank) {
      SectionTimes one = times(50, 60, 120, 10, 20, 50);
      for (double& time : one) time *= std::abs(noise(random)) * (random() % 20 == 0 ? 2 : 1);
      slow.add(step, rank, one);
    }
    EXPECT_FALSE(slow.find(step)) << "step " << step << ": " << to_string(*slow.find(step));
  }
}

}  // namespace
}  // namespace megatron
