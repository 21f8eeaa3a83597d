#include "megatron/datasets/retro/chunk_vectors.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/progress.h"
#include "megatron/datasets/detail/numpy_random.h"

namespace megatron {

void check_finite(std::span<const float> vectors, int64_t width, int64_t first,
                  const std::function<std::string(int64_t row)>& name) {
  const auto bad =
      std::find_if_not(vectors.begin(), vectors.end(), [](float x) { return std::isfinite(x); });
  if (bad == vectors.end()) return;
  const int64_t row = first + (bad - vectors.begin()) / width;
  throw_error(cat("the vector of ", name(row), " holds ", *bad, ", which is near to nothing",
                  "\nhint: another embedder, or --dtype fp32"));
}

void write_chunk_vectors(const ChunkDatabase& database, const TextOfIds& text_of,
                         const EmbedTexts& embed, const BlockFiles& vectors,
                         const RankShare& share) {
  const BlockShape& shape = vectors.shape();
  const std::vector<RowBlock> missing = vectors.missing(share);
  ProgressBar progress("making vectors", static_cast<uint64_t>(shape.rows), "chunks");
  uint64_t there = static_cast<uint64_t>(shape.rows);
  for (const RowBlock& block : missing) there -= static_cast<uint64_t>(block.size());
  progress.advance(there);
  for (const RowBlock& block : missing) {
    std::vector<std::string> texts;
    for (int64_t id = block.begin; id < block.end; ++id) texts.push_back(text_of(database.ids(id)));
    const std::vector<float> rows = embed(texts);
    MEGATRON_ASSERT(std::ssize(rows) == block.size() * shape.width);
    check_finite(rows, shape.width, block.begin, [&](int64_t id) {
      return cat("chunk ", id, ", \"", texts[static_cast<size_t>(id - block.begin)], "\",");
    });
    if (shape.dtype == "<f2") {
      std::vector<_Float16> halves;
      for (const float x : rows) halves.push_back(static_cast<_Float16>(x));
      vectors.write(block, std::as_bytes(std::span(halves)));
    } else {
      vectors.write(block, std::as_bytes(std::span(rows)));
    }
    progress.advance(static_cast<uint64_t>(block.size()));
  }
  vectors.wait_for_all();
}

std::vector<float> read_chunk_vectors(const BlockFiles& vectors, const RowBlock& block) {
  const NpyArray array = vectors.read(block);
  const auto count = static_cast<size_t>(array.size());
  std::vector<float> rows(count);
  if (array.dtype() == "<f2")
    std::copy_n(reinterpret_cast<const _Float16*>(array.bytes().data()), count, rows.begin());
  else
    std::copy_n(array.as<float>("<f4").data(), count, rows.begin());
  check_finite(rows, vectors.shape().width, block.begin,
               [&](int64_t id) { return cat("chunk ", id, " in ", vectors.file(block).string()); });
  return rows;
}

std::vector<float> draw_chunk_vectors(const BlockFiles& vectors, int64_t count, int64_t seed) {
  const int64_t rows = vectors.shape().rows, width = vectors.shape().width;
  MEGATRON_ASSERT(count <= rows);
  std::vector<uint8_t> taken(static_cast<size_t>(rows), count == rows ? 1 : 0);
  NumpyRandom random(static_cast<uint32_t>(seed));
  for (int64_t left = count == rows ? 0 : count; left > 0;) {
    uint8_t& row = taken[static_cast<size_t>(random.randint(0, rows))];
    left -= row == 0 ? 1 : 0;
    row = 1;
  }
  std::vector<float> out;
  out.reserve(static_cast<size_t>(count * width));
  for (int64_t i = 0; i < vectors.num_blocks(); ++i) {
    const RowBlock block = vectors.block(i);
    const std::vector<float> all = read_chunk_vectors(vectors, block);
    for (int64_t row = block.begin; row < block.end; ++row) {
      if (taken[static_cast<size_t>(row)] == 0) continue;
      const auto first = all.begin() + (row - block.begin) * width;
      out.insert(out.end(), first, first + width);
    }
  }
  return out;
}

}  // namespace megatron
