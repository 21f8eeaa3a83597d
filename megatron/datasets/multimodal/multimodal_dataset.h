// Samples of an index as sequences: several are packed into each, without attention between them,
// by their tokens and by the patches of their images.
//
// Columns, documents and order are those of SftDataset: a sample of n rows takes n - 1 positions.
// The order is a function of index, seed and epoch: a permutation of all samples, or, with a
// shuffle window, of the files and then of neighbouring samples, so that files are read nearly
// front to back. Samples that are repeated are in an epoch so often (MultimodalIndex::repetitions).
// The order depends neither on data-parallel sizes nor on workers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/gpt/gpt_dataset.h"
#include "megatron/datasets/multimodal/multimodal_index.h"

namespace megatron {

struct MultimodalDatasetOptions {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  LongSamples long_samples = LongSamples::kDrop;
  FusionOptions fusion;
  int64_t most_patches = 0;    // of the images of a sequence; 0: no limit
  int64_t shuffle_window = 0;  // samples; 0: all are permuted
  MediaLimits limits;
};

// Statistics of one epoch.
struct MultimodalCounts {
  int64_t samples = 0, cut = 0, dropped = 0, silent = 0, sequences = 0;
  int64_t positions = 0, counted = 0, patches = 0, most_patches = 0;  // most: of a sequence
  int64_t drawn = 0, packed = 0;  // samples with repetitions, and their positions in sequences
  std::string first_dropped;      // its name
  int64_t bad = 0;  // samples with a medium that cannot be decoded, of which nothing counts
};

// Rows of a medium in a sequence.
struct SequenceRun {
  int64_t position = 0;  // of its first row
  int64_t rows = 0;
  int64_t sample = 0, medium = 0;  // in the index
};

// The order of samples in an epoch. `shards`: the file of each, ascending.
std::vector<int64_t> sample_order(const std::vector<int64_t>& shards, int64_t seed, int64_t epoch,
                                  int64_t window);

class MultimodalDataset final : public Dataset {
 public:
  // As SftDataset. Throws Error if no sample is left, or if one has more patches than a sequence
  // may have.
  MultimodalDataset(std::shared_ptr<const MultimodalIndex> index, std::pair<double, double> bounds,
                    Split split, std::optional<int64_t> num_samples,
                    const MultimodalDatasetOptions& options);
  ~MultimodalDataset() override;
  int64_t size() const override;
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::vector<SampleImage> images(int64_t index) const override;
  // Throws Error that names the sample and the medium: bytes that cannot be read or decoded.
  void read_image(int64_t index, int64_t image, std::span<uint8_t> patches) const override;
  std::vector<SampleSound> sounds(int64_t index) const override;
  void read_sound(int64_t index, int64_t sound, std::span<float> frames) const override;
  const PixelTable* pixel_values() const override;
  // Ascending. Every run lies in the sequence as a whole.
  std::vector<SequenceRun> runs(int64_t index) const;
  const MultimodalIndex& index() const;
  std::string description() const override;
  std::string details() const override;
  const MultimodalCounts& counts() const;
  std::vector<std::pair<std::string, int64_t>> left_out() const override;

 private:
  std::string describe(const std::string& index) const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
