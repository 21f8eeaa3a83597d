// The times of all ranks over a log interval, as they are reported.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "megatron/reporting/sections.h"

namespace megatron {

// Of one section; milliseconds per step.
struct SectionSummary {
  double mean = 0;  // over the ranks
  double longest = 0;
  int longest_rank = 0;  // of several the first
};
struct SectionSummaries : std::array<SectionSummary, kNumSections> {};

// Collects what the outcomes of steps bring (StepNumbers::times). Every rank counts alike, however
// often it has reported; a rank that has not reported since the last take() does not count.
// Not thread safe.
class SectionMeans {
 public:
  void add(int rank, const SectionTimes& times);
  // Since the last call; nothing when no rank has reported.
  std::optional<SectionSummaries> take();

 private:
  struct Sum {
    SectionTimes times{};
    int64_t reports = 0;
  };
  std::vector<Sum> sums_;  // by rank
};

}  // namespace megatron
