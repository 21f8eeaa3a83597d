// Finds a rank that is slower than its peers, from the section times that all ranks report.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "megatron/reporting/sections.h"

namespace megatron {

struct SlowRank {
  int rank = 0;
  Section section = Section::kHost;
  double milliseconds = 0;       // time of the slow section
  double peer_milliseconds = 0;  // median of its peers
  double busy_milliseconds = 0;  // sum of all sections but communication
  double peer_busy_milliseconds = 0;
  int num_peers = 0;
};
// "rank 3 is slow: backward takes it 61.2 ms a step, its 3 peers 50.1 ms ...".
std::string to_string(const SlowRank& slow);

// The rule. Ranks of one group (a pipeline stage) do the same work. A rank's time in a section is
// the median over its latest steps; its excess over the median of the other ranks of its group must
// be
//   more than 10% of theirs, more than 2.5% of their busy time, and more than 2 ms,
// in each half of the window separately, so that neither a few outlier steps nor a temporarily busy
// machine suffice. Communication is excluded: it is where the others wait for the slow rank. Of
// several such ranks the one with the largest excess is reported, with the section of that excess.
//
// Not thread safe.
class SlowRanks {
 public:
  static constexpr int kShortestWindow = 16;  // steps
  static constexpr int kLeastReports = 4;     // of a rank in the window

  // Ranks with equal group_of[rank] are peers.
  explicit SlowRanks(std::vector<int> group_of);

  void add(int64_t step, int rank, const SectionTimes& times);
  // After the reports of a step; nothing while the window is not full. Where ranks take turns, it
  // looks once in each round of them.
  std::optional<SlowRank> find(int64_t step) const;
  // In steps. Where ranks take turns to report, kLeastReports of each and one more, which may be
  // missing, have to fit: 40 for 4,096 ranks.
  int64_t window() const { return window_; }

 private:
  struct Report {
    int64_t step;
    SectionTimes times;
  };
  struct Halves {
    int rank;
    // Medians over the older and the newer half of its reports
    std::array<SectionTimes, 2> times;
  };
  using Columns = std::array<std::array<std::vector<double>, kNumSections + 1>, 2>;
  std::optional<Halves> halves(int rank, int64_t step) const;
  static Columns columns_of(const std::vector<Halves>& known);
  static double value_of(const Halves& one, int half, int section);
  static double peers_of(const Columns& columns, const Halves& own, int half, int section);
  static std::optional<double> excess_of(const Columns& columns, const Halves& own, int section);
  static SlowRank describe(const Columns& columns, const Halves& own, int section);

  std::vector<std::vector<int>> groups_;
  std::vector<std::deque<Report>> reports_;  // by rank
  const int64_t round_;                      // steps in which every rank has its turn
  const int64_t window_;
  int64_t first_step_ = -1;
};

}  // namespace megatron
