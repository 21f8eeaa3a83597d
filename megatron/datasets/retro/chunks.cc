#include "megatron/datasets/retro/chunks.h"

#include <algorithm>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/base/threads.h"

namespace megatron {
namespace {

std::vector<DocumentChunk> cut_document(const IndexedDataset& data, uint32_t data_set,
                                        int64_t document, const ChunkRules& rules) {
  std::vector<int64_t> ids = data.read(document);
  MEGATRON_CHECK(std::ssize(ids) <= std::numeric_limits<uint32_t>::max(), data.prefix(),
                 ": document ", document, " has ", ids.size(), " tokens, expected less than 2^32");
  if (!ids.empty() && ids.back() == rules.eod) ids.pop_back();
  std::vector<DocumentChunk> chunks;
  for (int64_t begin = 0; begin < std::ssize(ids); begin += rules.length) {
    const int64_t end = std::min(begin + rules.length, std::ssize(ids));
    const int64_t tokens =
        rules.embedder_tokens(std::span(ids).subspan(static_cast<size_t>(begin), end - begin));
    chunks.push_back({data_set, static_cast<uint32_t>(document), static_cast<uint32_t>(begin),
                      static_cast<uint32_t>(end), static_cast<uint32_t>(tokens)});
  }
  return chunks;
}

}  // namespace

void check_one_sequence_per_document(const IndexedDataset& data) {
  const auto documents = data.document_indices();
  for (int64_t d = 0; d < data.num_documents(); ++d)
    MEGATRON_CHECK(documents[d] == d && documents[d + 1] == d + 1, data.prefix(), ": document ", d,
                   " has ", documents[d + 1] - documents[d],
                   " sequences, chunks are cut from documents of one",
                   "\nhint: preprocess-data without --split-sentences");
  MEGATRON_CHECK(data.num_documents() <= std::numeric_limits<uint32_t>::max(), data.prefix(),
                 " has ", data.num_documents(), " documents, a database names less than 2^32");
}

std::vector<DocumentChunk> cut_documents(const IndexedDataset& data, uint32_t data_set,
                                         int64_t first, int64_t last, const ChunkRules& rules,
                                         int threads) {
  MEGATRON_ASSERT(0 <= first && first <= last && last <= data.num_documents() && rules.length > 0);
  std::vector<std::vector<DocumentChunk>> of_documents(static_cast<size_t>(last - first));
  parallel_for(
      last - first, 16,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          of_documents[static_cast<size_t>(i)] = cut_document(data, data_set, first + i, rules);
      },
      threads);
  std::vector<DocumentChunk> all;
  for (const auto& chunks : of_documents) all.insert(all.end(), chunks.begin(), chunks.end());
  return all;
}

}  // namespace megatron
