// KV cache of a batch that is decoded together: one dense buffer per layer.
#pragma once

#include <vector>

#include "megatron/transformer/layer/kv_cache.h"

namespace megatron {

// Rows of different length are padded on the left, so that all rows end at the same position. Not
// thread safe.
class DenseKVCache final : public KVCache {
 public:
  // Up to `capacity` positions per layer, allocated as needed; the first padding[i] positions of
  // row i are padding.
  DenseKVCache(int64_t num_layers, int64_t capacity, std::vector<int64_t> padding);

  std::pair<at::Tensor, at::Tensor> append(int64_t layer_index, const at::Tensor& k,
                                           const at::Tensor& v) override;
  at::Tensor padding_mask() const override { return mask_; }

  // Positions held by every layer, after a complete forward.
  int64_t length() const { return length_; }
  // Call after each forward of `count` positions.
  void advance(int64_t count);

 private:
  int64_t capacity_;
  int64_t length_ = 0;
  int64_t appended_ = 0;  // positions of the current forward
  std::vector<int64_t> padding_;
  std::vector<at::Tensor> keys_,
      values_;       // [room, b, g, d] by layer; allocated and enlarged by append
  at::Tensor mask_;  // padding_mask() of the current forward
};

}  // namespace megatron
