#include "megatron/datasets/tuning/epoch_order.h"

#include <numeric>

#include "megatron/base/check.h"
#include "megatron/datasets/sampler.h"

namespace megatron {

std::vector<int32_t> epoch_order(int64_t rows, int64_t num_samples, int64_t seed, int64_t group) {
  MEGATRON_CHECK(rows > 0, "there are no texts");
  const int64_t groups = rows / group, count = num_samples == 0 ? rows : num_samples;
  MEGATRON_CHECK(groups * group == rows, "there are ", rows, " texts, not a multiple of ", group);
  std::vector<int32_t> order;
  for (int64_t epoch = 0; std::ssize(order) < count; ++epoch) {
    std::vector<int64_t> permutation(static_cast<size_t>(groups));
    std::iota(permutation.begin(), permutation.end(), int64_t{0});
    if (num_samples != 0) permutation = torch_randperm(groups, static_cast<uint64_t>(seed + epoch));
    for (const int64_t one : permutation)
      for (int64_t i = 0; i < group && std::ssize(order) < count; ++i)
        order.push_back(static_cast<int32_t>(one * group + i));
  }
  return order;
}

}  // namespace megatron
