#include "megatron/datasets/image_plan.h"

#include <algorithm>
#include <numeric>

namespace megatron {

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
