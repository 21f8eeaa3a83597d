// Several datasets interleaved so that at any point each has contributed its share to within one
// sample.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/gpt/gpt_dataset.h"

namespace megatron {

// Sample i of a blend is sample sample_ids[i] of member dataset_ids[i].
struct BlendIndices {
  std::vector<int16_t> dataset_ids;
  std::vector<int64_t> sample_ids;
};

// The greedy interleaving: sample i goes to the lowest member with the largest weight * max(i, 1) -
// (samples so far).
BlendIndices build_blending_indices(std::span<const double> weights, int64_t size);
// The same over all samples of all members; a member drops out when it is used up.
BlendIndices build_exhaustive_blending_indices(std::span<const int64_t> sizes);

class BlendedDataset : public Dataset {
 public:
  // `size` none: all samples of all members (their sizes then are the weights, and `weights` is not
  // used). The order is stored in the folder `cache_path`, if that is not empty. Throws Error if
  // the members have different columns, and if a member holds fewer samples than the blend takes
  // from it.
  BlendedDataset(std::vector<std::shared_ptr<const Dataset>> members, std::vector<double> weights,
                 std::optional<int64_t> size, Split split, const std::string& cache_path = "");
  ~BlendedDataset() override;

  int64_t size() const override;
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::pair<int64_t, int64_t> locate(int64_t index) const override;
  std::vector<SampleImage> images(int64_t index) const override;
  void read_image(int64_t index, int64_t image, std::span<uint8_t> patches) const override;
  std::vector<SampleSound> sounds(int64_t index) const override;
  void read_sound(int64_t index, int64_t sound, std::span<float> frames) const override;
  const PixelTable* pixel_values() const override;
  // Of all members together.
  std::vector<std::pair<std::string, int64_t>> left_out() const override;
  std::string description() const override;
  std::string details() const override;
  const std::vector<std::shared_ptr<const Dataset>>& members() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
