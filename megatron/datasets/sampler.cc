#include "megatron/datasets/sampler.h"

#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {

std::vector<int64_t> torch_randperm(int64_t n, uint64_t seed) {
  std::mt19937 engine(static_cast<uint32_t>(seed));
  const auto draw64 = [&] {
    const uint64_t high = engine();
    return (high << 32) | engine();
  };
  std::vector<int64_t> out(n);
  std::iota(out.begin(), out.end(), int64_t{0});
  const bool narrow = n < std::numeric_limits<uint32_t>::max() / 20;
  for (int64_t i = 0; i + 1 < n; ++i) {
    const uint64_t draw = narrow ? engine() : draw64();
    std::swap(out[i], out[i + static_cast<int64_t>(draw % static_cast<uint64_t>(n - i))]);
  }
  return out;
}

Sampler::Sampler(const SamplerConfig& config) : config_(config) {
  MEGATRON_ASSERT(config.data_parallel_rank >= 0 &&
                  config.data_parallel_rank < config.data_parallel_size);
  MEGATRON_CHECK(config.micro_batch_size > 0, "--micro-batch-size is ", config.micro_batch_size,
                 ", expected at least 1");
  const bool padded = config.type == DataloaderType::kSingle && !config.drop_last;
  const int64_t needed = padded ? 1 : samples_per_step();
  MEGATRON_CHECK(config.total_samples >= needed, "the dataset has ", config.total_samples,
                 " samples, one micro-batch on each of ", config.data_parallel_size,
                 " data-parallel ranks takes ", samples_per_step(),
                 "\nhint: give more data or a smaller --micro-batch-size");
}

bool Sampler::micro_batch(int64_t consumed, std::vector<int64_t>& ids) {
  const int64_t step = samples_per_step(), size = config_.micro_batch_size;
  MEGATRON_CHECK(consumed >= 0, consumed, " consumed samples, expected at least 0");
  ids.clear();
  if (config_.type == DataloaderType::kCyclic) return cyclic_micro_batch(consumed, ids);
  const int64_t left = config_.total_samples - consumed;
  if (left < (config_.drop_last ? step : 1)) return false;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t id = consumed + config_.data_parallel_rank * size + i;
    ids.push_back(id < config_.total_samples ? id : kPaddingSample);
  }
  return true;
}

bool Sampler::cyclic_micro_batch(int64_t consumed, std::vector<int64_t>& ids) {
  const int64_t step = samples_per_step(), size = config_.micro_batch_size,
                total = config_.total_samples;
  const int64_t ranks = config_.data_parallel_size, rank = config_.data_parallel_rank;
  const int64_t active = total - total % step;
  const int64_t epoch = consumed / active, offset = consumed % active;
  MEGATRON_CHECK(offset % step == 0, consumed, " consumed samples are ", offset, " in epoch ",
                 epoch, ", expected a multiple of micro batch size x data-parallel size = ", step,
                 "\nhint: the cyclic order cannot be continued with another batch layout; use "
                 "--dataloader-type single");
  const int64_t share = config_.data_sharding ? total / step * size : total / size * size;
  if (epoch != epoch_) {
    permutation_ = torch_randperm(share, static_cast<uint64_t>(epoch));
    epoch_ = epoch;
  }
  for (int64_t i = 0; i < size; ++i) {
    ids.push_back(config_.data_sharding ? rank * share + permutation_[offset / ranks + i]
                                        : permutation_[offset + rank + ranks * i]);
  }
  return true;
}

}  // namespace megatron
