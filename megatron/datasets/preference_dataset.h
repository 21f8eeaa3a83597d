// Pairs of a preferred and a rejected response to one prompt, for preference optimisation.
//
// Each pair is two neighbouring samples: number 2 i is the preferred response, 2 i + 1 the rejected
// one, so that even micro-batches hold whole pairs. A sample is one sequence from its first
// position on, [prompt | response], padded behind; its labels count where they are tokens of the
// response.
//
// Order: all pairs of an epoch, drawn anew for each from (seed, epoch).
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
  int64_t pad = 0;          // id behind the end of a sequence
  std::string description;  // of the pairs, one JSON object on one line: file, tokenizer, template
};

class PreferenceDataset final : public Dataset {
 public:
  // `num_samples`: two for each pair that is read, over as many epochs as that takes; 0: one epoch,
  // in the order of the pairs. Throws Error for no pairs, an odd number, and pairs whose prompt and
  // response have more than sequence_length + 1 tokens or no token before the response.
  PreferenceDataset(std::shared_ptr<const std::vector<PreferencePair>> pairs, int64_t num_samples,
                    PreferenceDatasetConfig config);
  int64_t size() const override { return num_samples_; }
  int64_t sequence_length() const override { return config_.sequence_length; }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  std::shared_ptr<const std::vector<PreferencePair>> pairs_;
  const bool in_order_;
  const int64_t num_samples_;
  const PreferenceDatasetConfig config_;
  std::vector<int32_t> order_;  // of the pairs, epoch after epoch
};

}  // namespace megatron
