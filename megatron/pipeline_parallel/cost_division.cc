#include "megatron/pipeline_parallel/cost_division.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// Divisions of the first layers into the first segments, the best of each length.
class Division {
 public:
  Division(const std::vector<double>& layers, double head, int64_t segments)
      : layers_(std::ssize(layers)), segments_(segments), head_(head), sums_{0} {
    for (const double cost : layers) sums_.push_back(sums_.back() + cost);
  }

  // The least `join` of the segments' `weight`; the ends of its segments go to `ends`.
  double best(const std::function<double(double)>& weight,
              const std::function<double(double, double)>& join, std::vector<int64_t>& ends) const {
    const auto size = static_cast<size_t>(layers_) + 1;
    std::vector<double> least(size, HUGE_VAL);
    least[0] = 0;
    std::vector<std::vector<int64_t>> begins;  // of the last segment, by the layers before its end
    for (int64_t segment = 1; segment <= segments_; ++segment) {
      std::vector<double> next(size, HUGE_VAL);
      std::vector<int64_t>& begin = begins.emplace_back(size, 0);
      const int64_t last = layers_ - (segments_ - segment);
      for (int64_t end = segment == segments_ ? last : segment; end <= last; ++end) {
        for (int64_t from = segment - 1; from < end; ++from) {
          const double all =
              join(least[static_cast<size_t>(from)], weight(cost(from, end, segment == segments_)));
          if (!(all < next[static_cast<size_t>(end)])) continue;
          next[static_cast<size_t>(end)] = all;
          begin[static_cast<size_t>(end)] = from;
        }
      }
      least = std::move(next);
    }
    ends.assign(1, layers_);
    for (int64_t segment = segments_ - 1; segment > 0; --segment)
      ends.insert(ends.begin(),
                  begins[static_cast<size_t>(segment)][static_cast<size_t>(ends.front())]);
    return least.back();
  }

 private:
  double cost(int64_t from, int64_t end, bool with_head) const {
    return sums_[static_cast<size_t>(end)] - sums_[static_cast<size_t>(from)] +
           (with_head ? head_ : 0);
  }

  const int64_t layers_, segments_;
  const double head_;
  std::vector<double> sums_;
};

}  // namespace

std::vector<int64_t> divide_by_cost(const std::vector<double>& layers, double head,
                                    int64_t segments) {
  MEGATRON_ASSERT(segments >= 1 && std::ssize(layers) >= segments, layers.size(), " layers for ",
                  segments, " segments");
  constexpr double kRounding = 1 + 1e-9;
  const Division division(layers, head, segments);
  std::vector<int64_t> ends;
  const double most = division.best([](double cost) { return cost; },
                                    [](double a, double b) { return std::max(a, b); }, ends);
  division.best([&](double cost) { return cost > most * kRounding ? HUGE_VAL : cost * cost; },
                [](double a, double b) { return a + b; }, ends);
  std::vector<int64_t> counts;
  for (size_t i = 0; i < ends.size(); ++i) counts.push_back(ends[i] - (i > 0 ? ends[i - 1] : 0));
  return counts;
}

}  // namespace megatron
