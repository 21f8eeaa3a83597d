#include "megatron/datasets/dataset.h"

#include <numeric>

#include "megatron/base/check.h"
#include "megatron/datasets/index_cache.h"

namespace megatron {

Sample::Sample(Columns columns)
    : columns_(std::move(columns)), memory_(new std::byte[columns_.block_bytes(1)]()) {}

Sample Dataset::sample(int64_t index) const {
  Sample out(columns());
  read(index, out.spans(), out.document_starts);
  out.dataset_id = locate(index).first;
  return out;
}

void Dataset::read_image(int64_t index, int64_t, std::span<uint8_t>) const {
  throw_error(cat("sample ", index, " has no images"));
}

void Dataset::read_sound(int64_t index, int64_t, std::span<float>) const {
  throw_error(cat("sample ", index, " has no sounds"));
}

std::string Dataset::fingerprint() const { return hash_text(description()); }

std::vector<int32_t> cu_seqlens(std::span<const int32_t> document_starts, int64_t sequence_length) {
  std::vector<int32_t> out(document_starts.begin(), document_starts.end());
  out.push_back(static_cast<int32_t>(sequence_length));
  return out;
}

std::vector<int64_t> document_ids(std::span<const int32_t> document_starts,
                                  int64_t sequence_length) {
  std::vector<int64_t> ids(static_cast<size_t>(sequence_length), 0);
  for (const int32_t start : document_starts)
    if (start > 0 && start < sequence_length) ++ids[static_cast<size_t>(start)];
  std::partial_sum(ids.begin(), ids.end(), ids.begin());
  return ids;
}

}  // namespace megatron
