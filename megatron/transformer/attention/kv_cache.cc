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

std::pair<at::Tensor, at::Tensor> KVCache::append(int64_t first, const at::Tensor& k,
                                                  const at::Tensor& v) {
  const int64_t count = k.size(0), end = first + count;
  MEGATRON_ASSERT(end <= capacity_, end, " positions in a cache of ", capacity_);
  reserve(keys_, k, first, end, capacity_);
  reserve(values_, v, first, end, capacity_);
  keys_.narrow(0, first, count).copy_(k);
  values_.narrow(0, first, count).copy_(v);
  return {keys_.narrow(0, 0, end), values_.narrow(0, 0, end)};
}

void KVCache::clear() {
  keys_.reset();
  values_.reset();
}

void KVCache::reorder(const at::Tensor& rows) {
  if (!keys_.defined()) return;
  keys_ = keys_.index_select(1, rows);
  values_ = values_.index_select(1, rows);
}

int64_t KVCache::bytes() const {
  return keys_.defined() ? static_cast<int64_t>(keys_.nbytes() + values_.nbytes()) : 0;
}

}  // namespace megatron
