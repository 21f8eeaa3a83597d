// What decoding keeps of earlier positions. A layer kind declares its own state: an attention layer
// the keys and values of every position, a recurrent layer a few tensors of fixed size per row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace megatron {

class Layer;

// A batch of rows that is decoded together. Rows of different length are padded on the left, so
// that all rows end at the same position.
struct DecodingShape {
  int64_t capacity = 0;          // positions of a row, at most
  std::vector<int64_t> padding;  // by row: how many of its first positions are padding
};

// State of one layer. Memory is allocated by the layer's forward, in the type of its activations.
class LayerState {
 public:
  virtual ~LayerState() = default;
  virtual void clear() = 0;  // forgets all positions and frees the memory
  // rows [n] int64: row i becomes what row rows[i] was.
  virtual void reorder(const at::Tensor& rows) = 0;
  virtual int64_t bytes() const = 0;  // of the memory held
};

// States of all layers of a model for one batch. Not thread safe.
class DecodingState {
 public:
  explicit DecodingState(DecodingShape shape);

  // The state that `layer` makes for itself when first asked for; null: it keeps none.
  LayerState* of(const Layer& layer);

  // Positions that every layer holds, after a complete forward.
  int64_t length() const { return length_; }
  // Call after each forward of `count` positions.
  void advance(int64_t count);
  // Keys that are padding for a forward of the next `count` positions, as an attention mask bool
  // [b, 1, count, length + count], True = masked; undefined: no row has padding.
  at::Tensor padding_mask(int64_t count, at::Device device) const;

  // As LayerState, of all layers.
  void clear();
  void reorder(const at::Tensor& rows);
  int64_t bytes() const;

 private:
  DecodingShape shape_;
  int64_t length_ = 0;
  std::unordered_map<const Layer*, std::unique_ptr<LayerState>> states_;
};

}  // namespace megatron
