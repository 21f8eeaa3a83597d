#include "megatron/datasets/image_plan.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"

namespace megatron {

std::vector<int64_t> balanced_samples(std::span<const int64_t> costs, int64_t rank, int64_t ranks) {
  MEGATRON_ASSERT(std::ssize(costs) % ranks == 0, costs.size(), " samples on ", ranks, " ranks");
  std::vector<int64_t> order(costs.size()), out;
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto cost = [&](int64_t i) { return costs[static_cast<size_t>(i)]; };
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return cost(a) > cost(b); });
  // Of each row the rank with the least so far has the dearest sample.
  std::vector<int64_t> by_load(static_cast<size_t>(ranks)), load(static_cast<size_t>(ranks), 0);
  std::iota(by_load.begin(), by_load.end(), int64_t{0});
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t place = i % by_load.size();
    if (place == 0) std::ranges::stable_sort(by_load, {}, [&](int64_t r) { return load[r]; });
    load[static_cast<size_t>(by_load[place])] += cost(order[i]);
    if (by_load[place] == rank) out.push_back(order[i]);
  }
  return out;
}

std::vector<int> plan_images(std::span<const int64_t> costs, int ranks) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<int64_t> load(static_cast<size_t>(ranks), 0);
  std::vector<int> out(costs.size());
  for (const size_t image : order) {
    const auto least = std::ranges::min_element(load);
    *least += costs[image];
    out[image] = static_cast<int>(least - load.begin());
  }
  return out;
}

}  // namespace megatron
