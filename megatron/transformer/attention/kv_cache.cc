#include "megatron/transformer/attention/kv_cache.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Grows `buffer` [n, ...] to at least `needed` and at most `capacity` rows, keeping the first
// `held`.
void reserve(at::Tensor& buffer, const at::Tensor& like, int64_t held, int64_t needed,
             int64_t capacity) {
  constexpr int64_t kLeast = 256;
  if (buffer.defined() && buffer.size(0) >= needed) return;
  std::vector<int64_t> shape = like.sizes().vec();
  shape[0] = std::min(capacity, std::max({needed, kLeast, 2 * held}));
  at::Tensor larger = at::empty(shape, like.options());
  if (held > 0) larger.narrow(0, 0, held).copy_(buffer.narrow(0, 0, held));
  buffer = std::move(larger);
}

}  // namespace

at::Tensor PositionBuffer::append(int64_t first, const at::Tensor& rows) {
  const int64_t count = rows.size(0), end = first + count;
  MEGATRON_ASSERT(end <= capacity_, end, " positions in a cache of ", capacity_);
  reserve(rows_, rows, first, end, capacity_);
  rows_.narrow(0, first, count).copy_(rows);
  return rows_.narrow(0, 0, end);
}

void PositionBuffer::reorder(const at::Tensor& samples) {
  if (rows_.defined()) rows_ = rows_.index_select(1, samples);
}

void KVCache::clear() {
  keys_.clear();
  values_.clear();
}

void KVCache::reorder(const at::Tensor& rows) {
  keys_.reorder(rows);
  values_.reorder(rows);
}

}  // namespace megatron
