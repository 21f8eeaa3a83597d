// Samples for encoders: [CLS] A [SEP] B [SEP], where A and B are the two halves of a piece of text,
// in their order or swapped, and some tokens are masked.
//
//   tokens      int64   [s]  with masked tokens
//   types       int64   [s]  0 up to the first [SEP], then 1
//   labels      int64   [s]  the token before masking; -1 where none was chosen
//   loss_mask   float32 [s]  1 where a token was chosen
//   is_random   int64   [1]  1 if the halves are swapped
//   num_masked  float32 [1]  number of chosen tokens: the weight of the sample
//
// Of s - 3 tokens round(s mask_prob) are chosen, at least one; 80% of these become [MASK], 10% a
// random token, 10% stay. Draws are those of std::mt19937_64(seed + index). No sample is padded.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/indexed_dataset.h"

namespace megatron {

struct MaskedDatasetConfig {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  double mask_prob = 0.15;
  int64_t vocab_size = 0;
  int64_t cls = 0, sep = 0, mask = 0;
  int64_t window() const { return sequence_length - 3; }
};

// Pieces of text of window() tokens each.
struct Windows {
  int64_t count = 0;
  std::function<std::vector<int64_t>(int64_t window)> read;
};

class MaskedDataset final : public Dataset {
 public:
  // `num_samples` windows, in a permutation of all for each epoch; none given: one epoch. `name`:
  // of the source, one JSON value. Throws Error if there is no window.
  MaskedDataset(Windows windows, std::string name, std::optional<int64_t> num_samples,
                const MaskedDatasetConfig& config);
  int64_t size() const override { return static_cast<int64_t>(order_.size()); }
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;

 private:
  const Windows windows_;
  const std::string name_;
  const MaskedDatasetConfig config_;
  std::vector<int64_t> order_;
};

// Sequences [first, last) of a file, each cut into windows; what is left over is not read.
Windows windows_of(const std::shared_ptr<const IndexedDataset>& file, int64_t first, int64_t last,
                   const MaskedDatasetConfig& config);
// Synthetic: each token is the one before it plus one.
Windows mock_windows(const MaskedDatasetConfig& config);

}  // namespace megatron
