// Made-up neighbours for made-up samples: --mock-data.
#pragma once

#include <memory>

#include "megatron/datasets/gpt/gpt_dataset.h"

namespace megatron {

// The columns of retro_columns(). Tokens are those of the vocabulary; some neighbours are
// missing, of some chunks all. What a sample has follows from its index and the seed.
class MockRetroDataset : public Dataset {
 public:
  MockRetroDataset(std::shared_ptr<const Dataset> samples, int64_t chunk_length, int64_t neighbors,
                   const GPTDatasetConfig& config);
  int64_t size() const override { return samples_->size(); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  const std::shared_ptr<const Dataset> samples_;
  const int64_t neighbors_, vocab_size_, seed_;
};

}  // namespace megatron
