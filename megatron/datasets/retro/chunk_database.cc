#include "megatron/datasets/retro/chunk_database.h"

#include <algorithm>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/progress.h"

namespace megatron {
namespace {

// Ids of neighbours are int32.
constexpr int64_t kMostChunks = std::numeric_limits<int32_t>::max();

struct Part {
  const IndexedDataset* data = nullptr;
  uint32_t data_set = 0;
  int64_t first = 0, last = 0;  // documents
  std::filesystem::path file;
};

// Runs of documents with about `tokens` tokens each.
std::vector<Part> divide(std::span<const DocumentRange> documents, int64_t tokens,
                         const std::filesystem::path& folder) {
  std::vector<Part> parts;
  for (size_t d = 0; d < documents.size(); ++d) {
    const DocumentRange& range = documents[d];
    const auto lengths = range.data->sequence_lengths();
    int64_t first = range.first, count = 0;
    for (int64_t i = range.first; i < range.last; ++i) {
      count += lengths[i];
      if (count < tokens && i + 1 < range.last) continue;
      parts.push_back({range.data.get(), static_cast<uint32_t>(d), first, i + 1,
                       folder / cat(d, "-", first, "-", i + 1, ".npy")});
      first = i + 1;
      count = 0;
    }
  }
  return parts;
}

std::span<const DocumentChunk> rows_of(const NpyArray& array, const std::filesystem::path& file) {
  MEGATRON_CHECK(
      array.dtype() == "<u4" && array.shape().size() == 2 && array.shape()[1] == kChunkColumns,
      file.string(), " holds \"", array.dtype(), "\" ", format_shape(array.shape()),
      ", chunks are \"<u4\" [chunks, ", kChunkColumns, "]");
  return {reinterpret_cast<const DocumentChunk*>(array.bytes().data()),
          static_cast<size_t>(array.shape()[0])};
}

void write_part(const Part& part, const ChunkRules& rules, int threads) {
  const std::vector<DocumentChunk> chunks =
      cut_documents(*part.data, part.data_set, part.first, part.last, rules, threads);
  AtomicFileWriter out(part.file);
  out.write(npy_header("<u4", {std::ssize(chunks), kChunkColumns}));
  out.write(chunks.data(), chunks.size() * sizeof(DocumentChunk));
  out.commit();
}

DatabaseCounts count_parts(std::span<const Part> parts) {
  DatabaseCounts counts;
  for (const Part& part : parts) {
    const NpyArray array(part.file);
    for (const DocumentChunk& chunk : rows_of(array, part.file))
      ++(chunk.embedder_tokens > 0 ? counts.chunks : counts.invalid);
  }
  return counts;
}

void join_parts(const std::filesystem::path& file, std::span<const Part> parts, int64_t chunks) {
  AtomicFileWriter out(file);
  out.write(npy_header("<u4", {chunks, kChunkColumns}));
  for (const Part& part : parts) {
    const NpyArray array(part.file);
    for (const DocumentChunk& chunk : rows_of(array, part.file))
      if (chunk.embedder_tokens > 0) out.write(&chunk, sizeof(chunk));
  }
  out.commit();
}

}  // namespace

DatabaseCounts build_chunk_database(const std::filesystem::path& file,
                                    std::span<const DocumentRange> documents,
                                    const ChunkRules& rules, int64_t block_rows, int threads) {
  const std::filesystem::path folder = file.parent_path() / "parts";
  std::filesystem::create_directories(folder);
  uint64_t all_documents = 0;
  for (const DocumentRange& range : documents) {
    check_one_sequence_per_document(*range.data);
    all_documents += static_cast<uint64_t>(range.last - range.first);
  }
  const std::vector<Part> parts = divide(documents, block_rows * rules.length, folder);
  ProgressBar progress("cutting documents", all_documents, "documents");
  for (const Part& part : parts) {
    if (!std::filesystem::exists(part.file)) write_part(part, rules, threads);
    progress.advance(static_cast<uint64_t>(part.last - part.first));
  }
  progress.finish();
  const DatabaseCounts counts = count_parts(parts);
  MEGATRON_CHECK(counts.chunks > 0, "the training split has no chunk that the embedder's ",
                 "tokenizer has a token for (", counts.invalid, " without)",
                 "\nhint: a larger share of --split, or another embedder");
  MEGATRON_CHECK(counts.chunks <= kMostChunks, "the training split has ", counts.chunks,
                 " chunks; neighbours are stored as int32, which names ", kMostChunks,
                 "\nhint: a larger --retro-chunk-length, or less data");
  join_parts(file, parts, counts.chunks);
  std::filesystem::remove_all(folder);
  return counts;
}

ChunkDatabase::ChunkDatabase(std::filesystem::path file,
                             std::vector<std::shared_ptr<const IndexedDataset>> data,
                             int64_t chunk_length, int64_t eod)
    : file_(std::move(file)),
      rows_(file_),
      data_(std::move(data)),
      length_(chunk_length),
      eod_(eod) {
  rows_of(rows_, file_);
}

DocumentChunk ChunkDatabase::chunk(int64_t id) const {
  MEGATRON_CHECK(id >= 0 && id < size(), file_.string(), " has ", size(), " chunks, there is no ",
                 id);
  const DocumentChunk chunk = rows_of(rows_, file_)[static_cast<size_t>(id)];
  const bool known =
      chunk.data_set < data_.size() && chunk.document < data_[chunk.data_set]->num_sequences();
  MEGATRON_CHECK(
      known && chunk.begin < chunk.end && chunk.end - chunk.begin <= length_ &&
          int64_t{chunk.end} <= data_[chunk.data_set]->sequence_lengths()[chunk.document],
      file_.string(), ": row ", id, " names tokens ", chunk.begin, " to ", chunk.end,
      " of document ", chunk.document, " of data set ", chunk.data_set,
      ", which are not there\nhint: the data was changed; build the project again");
  return chunk;
}

void ChunkDatabase::read(const DocumentChunk& chunk, std::span<int64_t> out) const {
  const size_t count = chunk.end - chunk.begin;
  data_[chunk.data_set]->read(chunk.document, chunk.begin, out.first(count));
}

std::vector<int64_t> ChunkDatabase::ids(int64_t id) const {
  const DocumentChunk found = chunk(id);
  std::vector<int64_t> out(found.end - found.begin);
  read(found, out);
  return out;
}

std::optional<int64_t> ChunkDatabase::continuation(int64_t id) const {
  if (id + 1 >= size()) return std::nullopt;
  const DocumentChunk here = chunk(id), next = chunk(id + 1);
  if (next.data_set != here.data_set || next.document != here.document) return std::nullopt;
  return id + 1;
}

void ChunkDatabase::retrieved(int64_t id, std::span<int64_t> out) const {
  MEGATRON_ASSERT(std::ssize(out) == retrieved_length());
  std::fill(out.begin(), out.end(), eod_);
  if (id == -1) return;
  const auto length = static_cast<size_t>(length_);
  read(chunk(id), out.first(length));
  if (const auto next = continuation(id)) read(chunk(*next), out.last(length));
}

}  // namespace megatron
