#include "megatron/inference/dense_kv_cache.h"

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

DenseKVCache::DenseKVCache(int64_t num_layers, int64_t capacity, std::vector<int64_t> padding)
    : capacity_(capacity),
      padding_(std::move(padding)),
      keys_(static_cast<size_t>(num_layers)),
      values_(static_cast<size_t>(num_layers)) {}

std::pair<at::Tensor, at::Tensor> DenseKVCache::append(int64_t layer_index, const at::Tensor& k,
                                                       const at::Tensor& v) {
  const int64_t count = k.size(0), end = length_ + count;
  MEGATRON_ASSERT(end <= capacity_, end, " positions in a cache of ", capacity_);
  at::Tensor& keys = keys_.at(static_cast<size_t>(layer_index));
  at::Tensor& values = values_.at(static_cast<size_t>(layer_index));
  reserve(keys, k, length_, end, capacity_);
  reserve(values, v, length_, end, capacity_);
  keys.narrow(0, length_, count).copy_(k);
  values.narrow(0, length_, count).copy_(v);
  if (appended_ != count) {
    appended_ = count;
    const bool padded =
        std::any_of(padding_.begin(), padding_.end(), [](int64_t n) { return n > 0; });
    if (padded) {
      const at::Tensor first =
          at::tensor(padding_, at::dtype(at::kLong)).to(k.device()).view({-1, 1, 1, 1});
      mask_ = at::arange(end, at::dtype(at::kLong).device(k.device())).view({1, 1, 1, end}) < first;
    }
  }
  return {keys.narrow(0, 0, end), values.narrow(0, 0, end)};
}

void DenseKVCache::advance(int64_t count) {
  MEGATRON_ASSERT(appended_ == count, "advance by ", count, " after ", appended_, " were appended");
  length_ += count;
  appended_ = 0;
}

}  // namespace megatron
