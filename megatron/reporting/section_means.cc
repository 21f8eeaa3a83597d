#include "megatron/reporting/section_means.h"

#include <cstddef>

namespace megatron {

void SectionMeans::add(int rank, const SectionTimes& times) {
  const auto place = static_cast<size_t>(rank);
  if (place >= sums_.size()) sums_.resize(place + 1);
  ++sums_[place].reports;
  for (int section = 0; section < kNumSections; ++section)
    sums_[place].times[section] += times[section];
}

std::optional<SectionSummaries> SectionMeans::take() {
  SectionSummaries summaries{};
  int num_ranks = 0;
  for (size_t rank = 0; rank < sums_.size(); ++rank) {
    const Sum& sum = sums_[rank];
    if (sum.reports == 0) continue;
    for (int section = 0; section < kNumSections; ++section) {
      const double own = sum.times[section] / static_cast<double>(sum.reports);
      SectionSummary& all = summaries[section];
      all.mean += own;
      if (num_ranks > 0 && own <= all.longest) continue;
      all.longest = own;
      all.longest_rank = static_cast<int>(rank);
    }
    ++num_ranks;
  }
  sums_.assign(sums_.size(), Sum{});
  if (num_ranks == 0) return std::nullopt;
  for (SectionSummary& all : summaries) all.mean /= num_ranks;
  return summaries;
}

}  // namespace megatron
