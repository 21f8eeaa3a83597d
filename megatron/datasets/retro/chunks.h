// Documents cut into chunks: the rows of a retrieval database.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "megatron/datasets/indexed_dataset.h"

namespace megatron {

// Tokens [begin, end) of a document: a row of db/chunks.npy, uint32 [chunks, 5].
struct DocumentChunk {
  uint32_t data_set = 0, document = 0, begin = 0, end = 0;
  uint32_t embedder_tokens = 0;  // ids of its text by the embedder's tokenizer
  bool operator==(const DocumentChunk&) const = default;
};
inline constexpr int64_t kChunkColumns = 5;
static_assert(sizeof(DocumentChunk) == kChunkColumns * sizeof(uint32_t));

struct ChunkRules {
  int64_t length = 64;  // tokens of a chunk; the last one of a document may be shorter
  int64_t eod = -1;     // ends a document and is in no chunk
  // Number of ids that the embedder's tokenizer gives for the text of these. Called from several
  // threads.
  std::function<int64_t(std::span<const int64_t> ids)> embedder_tokens;
};

// A document is one sequence. Throws Error that names the first document of several.
void check_one_sequence_per_document(const IndexedDataset& data);

// Chunks of documents [first, last), in order. Those without a token of the embedder, which belong
// in no database, have embedder_tokens 0. `threads` 0: all cores.
std::vector<DocumentChunk> cut_documents(const IndexedDataset& data, uint32_t data_set,
                                         int64_t first, int64_t last, const ChunkRules& rules,
                                         int threads = 0);

}  // namespace megatron
