// The chunks of the training documents of a run, in the order of data sets, documents and pieces.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "megatron/datasets/npy.h"
#include "megatron/datasets/retro/chunks.h"

namespace megatron {

// Documents [first, last) of a data set.
struct DocumentRange {
  std::shared_ptr<const IndexedDataset> data;
  int64_t first = 0, last = 0;
};

struct DatabaseCounts {
  int64_t chunks = 0, invalid = 0;
};

// Writes `file`, from parts of about `block_rows` chunks in the folder `parts` next to it; parts
// that an earlier call wrote for the same documents are taken as they are, and removed in the end.
// Throws Error if there is no chunk, or more than ids of neighbours can name.
DatabaseCounts build_chunk_database(const std::filesystem::path& file,
                                    std::span<const DocumentRange> documents,
                                    const ChunkRules& rules, int64_t block_rows, int threads = 0);

// Thread safe.
class ChunkDatabase {
 public:
  // Throws Error for a file that is cut or of another kind.
  ChunkDatabase(std::filesystem::path file, std::vector<std::shared_ptr<const IndexedDataset>> data,
                int64_t chunk_length, int64_t eod);

  int64_t size() const { return rows_.shape().front(); }
  int64_t chunk_length() const { return length_; }
  int64_t retrieved_length() const { return 2 * length_; }
  // Throws Error for an id outside of the database and for a row that names no tokens.
  DocumentChunk chunk(int64_t id) const;
  std::vector<int64_t> ids(int64_t id) const;  // the tokens of a chunk

  // What is retrieved: the chunk, and the next one if it is of the same document, each filled up
  // with EOD. Id -1: EOD alone.
  void retrieved(int64_t id, std::span<int64_t> out) const;
  // The next chunk of the same document.
  std::optional<int64_t> continuation(int64_t id) const;
  const IndexedDataset& data(int64_t data_set) const { return *data_[data_set]; }
  int64_t num_data_sets() const { return std::ssize(data_); }

 private:
  void read(const DocumentChunk& chunk, std::span<int64_t> out) const;
  std::filesystem::path file_;
  NpyArray rows_;
  std::vector<std::shared_ptr<const IndexedDataset>> data_;
  int64_t length_, eod_;
};

}  // namespace megatron
