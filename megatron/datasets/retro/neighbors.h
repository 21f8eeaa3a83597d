// Neighbours of the chunks of samples: ids of chunks of a database whose vectors are near, and that
// are of none of the sample's own documents.
//
// query/<split>-<fingerprint>/ holds them for the samples of one dataset, as int32
// [samples x chunks of a sample, saved] in block files, nearest first and -1 behind, and
// description.json, which says of which samples they are.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/retro/chunk_vectors.h"
#include "megatron/datasets/retro/retro_project.h"

namespace megatron {

// What a sample looks up.
struct RetroSample {
  std::vector<int64_t> ids;        // its tokens
  int64_t data_set = -1;           // of the database; -1: one that the database does not have
  std::vector<int64_t> documents;  // all that it reads from, also for its last label
};

// Samples of GPT, and where in the database's data sets they come from. Thread safe.
class RetroSamples {
 public:
  // `count`: samples that a run takes, at most those of the dataset; 0: all. Throws Error unless
  // `samples` are of a GPTDataset, or a blend of these.
  RetroSamples(std::shared_ptr<const Dataset> samples, const ChunkDatabase& database,
               int64_t count = 0);
  int64_t size() const { return size_; }
  const Dataset& dataset() const { return *samples_; }
  RetroSample read(int64_t index) const;

 private:
  std::shared_ptr<const Dataset> samples_;
  std::vector<int64_t> data_sets_;  // of each member of the blend
  int64_t size_;
};

// The first chunks of `found` that are of no document of the sample, -1 behind; fills `out`.
void keep_neighbors(std::span<const int64_t> found, const ChunkDatabase& database,
                    const RetroSample& sample, std::span<int32_t> out);

struct NeighborSearch {
  int64_t found = 200;  // --retro-query-num-neighbors-query
  int64_t saved = 20;   // --retro-query-num-neighbors-save
  int64_t block_rows = 100000;
};

// Writes the neighbours of `samples`, those blocks that are missing, and waits for those of the
// other ranks. A chunk of a sample without text has none.
void query_neighbors(const RetroProject& project, const std::string& split,
                     const RetroSamples& samples, const ChunkDatabase& database,
                     const TextOfIds& text_of, const EmbedTexts& embed, const VectorIndex& index,
                     const NeighborSearch& search, const RankShare& share = {});

// Neighbours on disk. Thread safe.
class Neighbors {
 public:
  // Throws Error if the project has none of these samples (with what differs from those it has), or
  // not all.
  Neighbors(const RetroProject& project, const std::string& split, const Dataset& samples,
            int64_t chunk_length);
  int64_t num_samples() const { return num_samples_; }
  int64_t saved() const { return files_.shape().width; }
  // The ids for one chunk of a sample.
  std::span<const int32_t> of_chunk(int64_t sample, int64_t chunk) const;

 private:
  int64_t num_samples_ = 0, chunks_ = 0;
  BlockFiles files_;
  std::vector<NpyArray> blocks_;
};

}  // namespace megatron
