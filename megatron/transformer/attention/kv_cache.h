// Keys and values of the earlier positions of one attention layer, for decoding.
#pragma once

#include <utility>

#include "megatron/transformer/layer/layer_state.h"

namespace megatron {

// One dense buffer each for keys and values, allocated as needed.
class KVCache final : public LayerState {
 public:
  explicit KVCache(int64_t capacity) : capacity_(capacity) {}

  // Puts keys and values [s, b, g, d] at the positions from `first` on and returns all keys and
  // values up to them, [first + s, b, g, d] each.
  std::pair<at::Tensor, at::Tensor> append(int64_t first, const at::Tensor& k, const at::Tensor& v);

  void clear() override;
  void reorder(const at::Tensor& rows) override;
  int64_t bytes() const override;

 private:
  int64_t capacity_;
  at::Tensor keys_, values_;  // [room, b, g, d]; allocated and enlarged by append
};

}  // namespace megatron
