// What attention keeps of earlier positions for decoding: keys and values, or latents.
#pragma once

#include <utility>

#include "megatron/transformer/layer/layer_state.h"

namespace megatron {

// Rows of all positions in one dense buffer, which is allocated and enlarged as needed.
class PositionBuffer {
 public:
  explicit PositionBuffer(int64_t capacity) : capacity_(capacity) {}

  // Puts rows [s, b, ...] at the positions from `first` on and returns all up to them,
  // [first + s, b, ...].
  at::Tensor append(int64_t first, const at::Tensor& rows);

  void clear() { rows_.reset(); }
  // As LayerState::reorder.
  void reorder(const at::Tensor& samples);
  int64_t bytes() const { return rows_.defined() ? static_cast<int64_t>(rows_.nbytes()) : 0; }

 private:
  int64_t capacity_;
  at::Tensor rows_;  // [room, b, ...]
};

// Keys and values of the earlier positions of one attention layer.
class KVCache final : public LayerState {
 public:
  explicit KVCache(int64_t capacity) : keys_(capacity), values_(capacity) {}

  // Puts keys and values [s, b, g, d] at the positions from `first` on and returns all keys and
  // values up to them, [first + s, b, g, d] each.
  std::pair<at::Tensor, at::Tensor> append(int64_t first, const at::Tensor& k,
                                           const at::Tensor& v) {
    return {keys_.append(first, k), values_.append(first, v)};
  }

  void clear() override;
  void reorder(const at::Tensor& rows) override;
  int64_t bytes() const override { return keys_.bytes() + values_.bytes(); }

 private:
  PositionBuffer keys_, values_;
};

// [norm(c) | rot(r)] of the earlier positions of one layer of multi-latent attention, [s, b, kv
// rank + rotated features].
class LatentCache final : public LayerState {
 public:
  explicit LatentCache(int64_t capacity) : latents_(capacity) {}

  // As PositionBuffer::append.
  at::Tensor append(int64_t first, const at::Tensor& latents) {
    return latents_.append(first, latents);
  }

  void clear() override { latents_.clear(); }
  void reorder(const at::Tensor& rows) override { latents_.reorder(rows); }
  int64_t bytes() const override { return latents_.bytes(); }

 private:
  PositionBuffer latents_;
};

}  // namespace megatron
