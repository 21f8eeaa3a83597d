// What training reads: numbered samples with columns of fixed shapes. Sample i is a function of the
// dataset's description and of i.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "megatron/datasets/columns.h"
#include "megatron/datasets/sample_images.h"
#include "megatron/datasets/sample_sounds.h"

namespace megatron {

// A sample that owns its memory.
class Sample {
 public:
  explicit Sample(Columns columns);
  Sample(Sample&&) = default;
  // A copy of the elements of a column; throws as Columns::index().
  template <class T>
  std::vector<T> get(std::string_view column) const {
    const std::span<const T> elements = block().row<T>(column, 0);
    return {elements.begin(), elements.end()};
  }
  SampleSpans spans() { return {block(), 0}; }

  // First position of each document (a piece that attends only to itself), ascending, the first
  // being 0. One entry if attention crosses documents (the default). Together with the sequence
  // length this is cu_seqlens.
  std::vector<int32_t> document_starts;
  int64_t dataset_id = 0;  // member of a blend

 private:
  ColumnBlock block() const { return {columns_, memory_.get(), 1}; }
  Columns columns_;
  std::unique_ptr<std::byte[]> memory_;
};

// Const functions may be called from several threads.
class Dataset {
 public:
  explicit Dataset(Columns columns) : columns_(std::move(columns)) {}
  virtual ~Dataset() = default;
  const Columns& columns() const { return columns_; }
  int64_t sequence_length() const { return columns_.sequence_length(); }
  virtual int64_t size() const = 0;  // number of samples
  // Writes sample `index`, 0 <= index < size(), and its document_starts (see Sample).
  virtual void read(int64_t index, const SampleSpans& out,
                    std::vector<int32_t>& document_starts) const = 0;
  // Maps sample `index` to (member of the blend, index within it); a plain dataset is its own
  // member 0.
  virtual std::pair<int64_t, int64_t> locate(int64_t index) const { return {0, index}; }
  // The images of a sample in the order of its text; default: there are none.
  virtual std::vector<SampleImage> images(int64_t /*index*/) const { return {}; }
  // Writes the patches of image `image` of images(index), its bytes().
  virtual void read_image(int64_t index, int64_t image, std::span<uint8_t> patches) const;
  // Its sounds, likewise, and the frames of one, its elements().
  virtual std::vector<SampleSound> sounds(int64_t /*index*/) const { return {}; }
  virtual void read_sound(int64_t index, int64_t sound, std::span<float> frames) const;
  // Of all images; null: samples have neither images nor sounds.
  virtual const PixelTable* pixel_values() const { return nullptr; }
  // Numbers of samples of its source that it leaves out or cuts, by reason; default: none.
  virtual std::vector<std::pair<std::string, int64_t>> left_out() const { return {}; }
  // Everything that order and content of the samples depend on (files, split, blend, sequence
  // length, number of samples, seed, ...), as one JSON object on one line.
  virtual std::string description() const = 0;
  // The description with the values that its hashes stand for, which a checkpoint keeps so that a
  // resume can name what differs.
  virtual std::string details() const { return description(); }

  Sample sample(int64_t index) const;
  // 32 hexadecimal digits of a hash of description(). Equal fingerprints: equal samples in equal
  // order.
  std::string fingerprint() const;

 private:
  const Columns columns_;
};

// Document starts followed by the sequence length, as variable-length attention kernels take it.
std::vector<int32_t> cu_seqlens(std::span<const int32_t> document_starts, int64_t sequence_length);

// For each of the s tokens, the index of its document, from 0.
std::vector<int64_t> document_ids(std::span<const int32_t> document_starts,
                                  int64_t sequence_length);

}  // namespace megatron
