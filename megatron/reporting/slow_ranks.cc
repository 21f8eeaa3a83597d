#include "megatron/reporting/slow_ranks.h"

#include <algorithm>
#include <map>

#include "megatron/base/format.h"

namespace megatron {

namespace {

constexpr double kLeastShare = 0.10;       // share of the peers' time in the section
constexpr double kLeastBusyShare = 0.025;  // share of their busy time
constexpr double kLeastMilliseconds = 2.0;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// The median of the values without one of them.
double median_without(const std::vector<double>& sorted, double value) {
  const auto left_out =
      static_cast<size_t>(std::lower_bound(sorted.begin(), sorted.end(), value) - sorted.begin());
  const auto at = [&](size_t i) { return sorted[i < left_out ? i : i + 1]; };
  const size_t count = sorted.size() - 1;
  return count % 2 == 1 ? at(count / 2) : (at(count / 2 - 1) + at(count / 2)) / 2;
}

SectionTimes medians_of(const std::vector<SectionTimes>& rows) {
  SectionTimes out{};
  for (int section = 0; section < kNumSections; ++section) {
    std::vector<double> values;
    for (const SectionTimes& row : rows) values.push_back(row[section]);
    out[section] = median(std::move(values));
  }
  return out;
}

}  // namespace

std::string to_string(const SlowRank& slow) {
  return format_text(
      "rank %d is slow: its %s takes %.1f ms a step, that of %d peer%s %.1f ms; apart "
      "from waiting for others a step takes "
      "it %.1f ms, them %.1f ms",
      slow.rank, section_name(slow.section), slow.milliseconds, slow.num_peers,
      slow.num_peers == 1 ? "" : "s", slow.peer_milliseconds, slow.busy_milliseconds,
      slow.peer_busy_milliseconds);
}

SlowRanks::SlowRanks(std::vector<int> group_of)
    : reports_(group_of.size()),
      round_(steps_per_report(static_cast<int>(group_of.size()))),
      window_(std::max<int64_t>(kShortestWindow, (kLeastReports + 1) * round_)) {
  std::map<int, std::vector<int>> members;
  for (size_t rank = 0; rank < group_of.size(); ++rank)
    members[group_of[rank]].push_back(static_cast<int>(rank));
  for (auto& [group, ranks] : members)
    if (ranks.size() > 1) groups_.push_back(std::move(ranks));
}

void SlowRanks::add(int64_t step, int rank, const SectionTimes& times) {
  if (first_step_ < 0) first_step_ = step;
  std::deque<Report>& reports = reports_.at(rank);
  reports.push_back({step, times});
  while (reports.front().step <= step - window_) reports.pop_front();
}

std::optional<SlowRanks::Halves> SlowRanks::halves(int rank, int64_t step) const {
  std::vector<SectionTimes> all;
  for (const Report& report : reports_[static_cast<size_t>(rank)])
    if (report.step > step - window_) all.push_back(report.times);
  if (all.size() < kLeastReports) return std::nullopt;
  const auto middle = all.begin() + static_cast<int64_t>(all.size() / 2);
  return Halves{rank, {medians_of({all.begin(), middle}), medians_of({middle, all.end()})}};
}

std::optional<SlowRank> SlowRanks::find(int64_t step) const {
  const int64_t steps = step - first_step_ + 1;
  if (first_step_ < 0 || steps < window_ || steps % round_ != 0) return std::nullopt;
  std::optional<SlowRank> slowest;
  double largest = 0;
  for (const std::vector<int>& ranks : groups_) {
    std::vector<Halves> known;
    for (const int rank : ranks)
      if (const std::optional<Halves> one = halves(rank, step)) known.push_back(*one);
    if (known.size() < 2) continue;
    const Columns columns = columns_of(known);
    for (const Halves& own : known) {
      for (int section = 0; section < kNumSections; ++section) {
        if (section == static_cast<int>(Section::kCommunication)) continue;
        const std::optional<double> excess = excess_of(columns, own, section);
        if (!excess || *excess <= largest) continue;
        largest = *excess;
        slowest = describe(columns, own, section);
      }
    }
  }
  return slowest;
}

// The sorted times of all ranks of a group, by half and section; the last column is the busy time.
SlowRanks::Columns SlowRanks::columns_of(const std::vector<Halves>& known) {
  Columns columns;
  for (int half = 0; half < 2; ++half) {
    for (int section = 0; section <= kNumSections; ++section) {
      std::vector<double>& column = columns[half][section];
      for (const Halves& one : known) column.push_back(value_of(one, half, section));
      std::sort(column.begin(), column.end());
    }
  }
  return columns;
}

double SlowRanks::value_of(const Halves& one, int half, int section) {
  return section == kNumSections ? busy_time(one.times[half]) : one.times[half][section];
}

double SlowRanks::peers_of(const Columns& columns, const Halves& own, int half, int section) {
  return median_without(columns[half][section], value_of(own, half, section));
}

// Excess of the rank over its peers, if it is beyond the bounds in both halves.
std::optional<double> SlowRanks::excess_of(const Columns& columns, const Halves& own, int section) {
  double sum = 0;
  for (int half = 0; half < 2; ++half) {
    const double peers = peers_of(columns, own, half, section);
    const double more = own.times[half][section] - peers;
    const double least =
        std::max({kLeastShare * peers, kLeastBusyShare * peers_of(columns, own, half, kNumSections),
                  kLeastMilliseconds});
    if (more <= least) return std::nullopt;
    sum += more;
  }
  return sum / 2;
}

SlowRank SlowRanks::describe(const Columns& columns, const Halves& own, int section) {
  const auto mean = [](const auto& of_half) { return (of_half(0) + of_half(1)) / 2; };
  SlowRank slow;
  slow.rank = own.rank;
  slow.section = static_cast<Section>(section);
  slow.milliseconds = mean([&](int half) { return own.times[half][section]; });
  slow.peer_milliseconds = mean([&](int half) { return peers_of(columns, own, half, section); });
  slow.busy_milliseconds = mean([&](int half) { return busy_time(own.times[half]); });
  slow.peer_busy_milliseconds =
      mean([&](int half) { return peers_of(columns, own, half, kNumSections); });
  slow.num_peers = static_cast<int>(columns[0][section].size()) - 1;
  return slow;
}

}  // namespace megatron
