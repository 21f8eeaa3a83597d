// Samples of GPT with the neighbours of their chunks.
#pragma once

#include <memory>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/retro/chunk_database.h"
#include "megatron/datasets/retro/neighbors.h"

namespace megatron {

// Columns that a sample of s tokens has beside those of GPT, with l = s / chunk_length chunks:
// neighbor_tokens int64 [l, neighbors, 2 chunk_length], of each neighbour the chunk and its
// continuation; neighbor_mask uint8 [l, neighbors], 0: there is none, and its tokens are EOD.
Columns retro_columns(const Columns& samples, int64_t chunk_length, int64_t neighbors);

class RetroDataset : public Dataset {
 public:
  // Throws Error if more neighbours are asked for than were saved.
  RetroDataset(std::shared_ptr<const Dataset> samples,
               std::shared_ptr<const ChunkDatabase> database, Neighbors neighbors,
               int64_t num_neighbors);

  int64_t size() const override;
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::pair<int64_t, int64_t> locate(int64_t index) const override;
  std::string description() const override;

 private:
  std::shared_ptr<const Dataset> samples_;
  std::shared_ptr<const ChunkDatabase> database_;
  const Neighbors neighbors_;
  const int64_t num_neighbors_;
};

}  // namespace megatron
