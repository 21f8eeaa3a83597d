// Which samples a data-parallel rank reads next, as a function of one number: the samples consumed
// so far by all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/datasets/data_config.h"

namespace megatron {

struct SamplerConfig {
  DataloaderType type = DataloaderType::kSingle;
  int64_t total_samples = 0;
  int64_t micro_batch_size = 1;
  int64_t data_parallel_rank = 0;
  int64_t data_parallel_size = 1;
  bool data_sharding = true;  // cyclic: each rank permutes its own share
  bool drop_last = true;      // single: false pads the last batch with kPaddingSample
};

// Stands for "sample 0 with a loss mask of zeros".
inline constexpr int64_t kPaddingSample = -1;

class Sampler {
 public:
  explicit Sampler(const SamplerConfig& config);  // throws Error if there is not one micro-batch

  // Ids of this rank's micro-batch when `consumed` samples (a multiple of samples_per_step()) have
  // been read. False when the samples are used up; a cyclic sampler never is.
  bool micro_batch(int64_t consumed, std::vector<int64_t>& ids);
  // micro_batch_size * data_parallel_size: the advance of `consumed` per micro-batch.
  int64_t samples_per_step() const { return config_.micro_batch_size * config_.data_parallel_size; }
  const SamplerConfig& config() const { return config_; }

 private:
  bool cyclic_micro_batch(int64_t consumed, std::vector<int64_t>& ids);
  SamplerConfig config_;
  std::vector<int64_t> permutation_;  // permutation of epoch_
  int64_t epoch_ = -1;
};

// torch.randperm(n) with a CPU generator seeded with `seed`.
std::vector<int64_t> torch_randperm(int64_t n, uint64_t seed);

}  // namespace megatron
