// Synthetic data for --mock-data: documents that count upwards from a random token, each ending
// with the end-of-document token. Sample i is a function of (seed, split, i), so any number of
// samples can be read in any order.
#pragma once

#include <cstdint>

#include "megatron/datasets/gpt/gpt_dataset.h"

namespace megatron {

class MockGPTDataset : public Dataset {
 public:
  MockGPTDataset(Split split, int64_t num_samples, const GPTDatasetConfig& config);
  int64_t size() const override { return num_samples_; }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  Split split_;
  int64_t num_samples_;
  GPTDatasetConfig config_;
};

}  // namespace megatron
