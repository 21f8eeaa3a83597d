// Pairs of a preferred and a rejected response to one prompt, for preference optimisation (DPO).
//
// Each pair is two consecutive samples: 2 i is the preferred response, 2 i + 1 the rejected one, so
// that even micro-batch sizes hold whole pairs. A sample is one sequence, [prompt | response |
// padding]; only labels that are response tokens are trained on.
//
// Order: a permutation of all pairs per epoch, from (seed, epoch).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "megatron/datasets/dataset.h"

namespace megatron {

struct PreferencePair {
  std::vector<int32_t> prompt, chosen, rejected;  // token ids; responses are not empty
};

struct PreferenceDatasetConfig {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  int64_t pad = 0;          // id after the end of a sequence
  std::string description;  // one JSON object on one line: file, tokenizer, template
};

class PreferenceDataset final : public Dataset {
 public:
  // `num_samples`: two per pair, over as many epochs as needed; 0: one epoch, in file order. Throws
  // Error if there are no pairs, if the number is odd, and for pairs whose prompt and response have
  // more than sequence_length + 1 tokens or no token before the response.
  PreferenceDataset(std::shared_ptr<const std::vector<PreferencePair>> pairs, int64_t num_samples,
                    PreferenceDatasetConfig config);
  int64_t size() const override { return num_samples_; }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  std::shared_ptr<const std::vector<PreferencePair>> pairs_;
  const bool in_order_;
  const int64_t num_samples_;
  const PreferenceDatasetConfig config_;
  std::vector<int32_t> order_;  // order of the pairs, epoch after epoch
};

}  // namespace megatron
