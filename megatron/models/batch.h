// The inputs of a model for one micro-batch, on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/tensor/attention/unpadded_rows.h"
#include "megatron/tensor/random.h"
#include "megatron/transformer/layer/token_weights.h"

namespace megatron {

class ProcessGroup;
struct PackedImages;
struct PackedSounds;

class Batch {
 public:
  // The tensor of a column, [b, shape of a sample]; of a column that is split over context-parallel
  // ranks, this rank's part of the first dimension of a sample. Throws Error that names the columns
  // if there is none of this name.
  const at::Tensor& operator[](std::string_view column) const;
  // Undefined if there is none.
  at::Tensor find(std::string_view column) const;
  // Adds a column, or replaces its tensor.
  void set(std::string_view column, at::Tensor tensor);
  using NamedTensor = std::pair<std::string, at::Tensor>;
  const std::vector<NamedTensor>& columns() const { return columns_; }
  std::vector<NamedTensor>& columns() { return columns_; }

  // The rows of the texts that a column marks (Column::marks_text); null: padding is computed, too.
  std::shared_ptr<const UnpaddedRows> rows_of(std::string_view column) const;
  using NamedRows = std::pair<std::string, std::shared_ptr<UnpaddedRows>>;
  std::vector<NamedRows> unpadded;

  // [b, s] int64 of the whole sequence: tokens attend within their document only; undefined: no
  // boundaries
  at::Tensor document_ids;
  // The same documents as rows that kernels attend within, on GPUs at one context-parallel rank;
  // null: not known
  std::shared_ptr<UnpaddedRows> document_rows;
  // Elements of a sample's loss weight that are not 0, at most; 0: not known
  int64_t most_counted = 0;
  // [b] fp32 (fp64): output of the reference model, for tasks that have one, on the last stage; see
  // training/task.h
  at::Tensor reference;
  // Of the whole sequences, if the data has a loss weight
  SequenceTotals totals;
  // Of models that see (models/vision/packed_images.h); null: there are none
  std::shared_ptr<const PackedImages> images;
  // Of models that hear (models/audio/packed_sounds.h)
  std::shared_ptr<const PackedSounds> sounds;
  // [s, b, h] in the model's type: what stands in the places of tokens of media, else zeros, by
  // Model::with_media_encoded(); undefined: the model computes it
  at::Tensor encoded_media;
  at::Tensor padding;  // bool [b, s], True = lengthens a sequence; undefined: nothing does
  // Samples [b] and positions [s] of this rank's part of the sequences
  TokenPositions place;
  // context-parallel group of these sequences; null: that of the mesh
  const ProcessGroup* cp = nullptr;

 private:
  std::vector<NamedTensor> columns_;  // few: a search is cheaper than a hash
};

}  // namespace megatron
