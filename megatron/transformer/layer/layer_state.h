// What decoding keeps of earlier positions. A layer kind declares its own state: an attention layer
// the keys and values of every position, in blocks of a pool; a recurrent layer a few tensors of
// fixed size per sequence.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "megatron/tensor/attention/paged_attention.h"

namespace megatron {

class Layer;

// Tokens of several sequences, one after another in one row of the model: [1, t] ids, [t, 1, h]
// activations.
struct RaggedBatch {
  PagedRows rows;
  std::vector<int64_t> slots;  // by part: which state of fixed size is that of its sequence
  int64_t num_slots = 0;       // that there are
};

// State of one layer for all sequences. Memory is allocated by the layer's forward, in the type of
// its activations, and enlarged when a batch has more blocks or slots than those before. A part
// that starts at position 0 starts anew, whatever its blocks and its slot held.
class LayerState {
 public:
  virtual ~LayerState() = default;
  virtual void clear() = 0;           // forgets all sequences and frees the memory
  virtual int64_t bytes() const = 0;  // of the memory held
};

// States of all layers of a model. Not thread safe.
class DecodingState {
 public:
  // The state that `layer` makes for itself when first asked for; null: it keeps none.
  LayerState* of(const Layer& layer);

  // As LayerState, of all layers.
  void clear();
  int64_t bytes() const;

 private:
  std::unordered_map<const Layer*, std::unique_ptr<LayerState>> states_;
};

// One forward of decoding.
struct DecodingPass {
  DecodingState& state;
  const RaggedBatch& batch;
};

}  // namespace megatron
