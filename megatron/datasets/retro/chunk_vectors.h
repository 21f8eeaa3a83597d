// Vectors of the chunks of a database, and an index of them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "megatron/datasets/retro/block_files.h"
#include "megatron/datasets/retro/chunk_database.h"

namespace megatron {

// The text of token ids, without EOD.
using TextOfIds = std::function<std::string(std::span<const int64_t> ids)>;
// fp32 [texts, width], of each text alone whatever stands beside it.
using EmbedTexts = std::function<std::vector<float>(std::span<const std::string> texts)>;

// Writes the blocks of `vectors` that are missing, as float32 or float16, and waits for those of
// the other ranks. Throws Error that names chunk and text of a vector that is not finite.
void write_chunk_vectors(const ChunkDatabase& database, const TextOfIds& text_of,
                         const EmbedTexts& embed, const BlockFiles& vectors,
                         const RankShare& share = {});

// A block of vectors as fp32 [rows, width].
std::vector<float> read_chunk_vectors(const BlockFiles& vectors, const RowBlock& block);

// `count` vectors of different chunks, drawn by RandomState(seed), in the order of their ids.
std::vector<float> draw_chunk_vectors(const BlockFiles& vectors, int64_t count, int64_t seed);

// Throws Error that names the first row (from `first` on) with an element that is not finite.
void check_finite(std::span<const float> vectors, int64_t width, int64_t first,
                  const std::function<std::string(int64_t row)>& name);

// The nearest of the database's vectors, by squared L2 distance.
class VectorIndex {
 public:
  virtual ~VectorIndex() = default;
  virtual int64_t size() const = 0;   // vectors
  virtual int64_t width() const = 0;  // elements of each
  // Ids [count, k] of the k nearest to each of `queries` [count, width], nearest first, -1 behind
  // if there are fewer; of vectors that are as near the lower id comes first.
  virtual std::vector<int64_t> search(std::span<const float> queries, int64_t k) const = 0;
};

}  // namespace megatron
