// What decoding keeps of earlier positions. A layer kind declares its own state: an attention layer
// the keys and values of every position, in blocks of a pool; a recurrent layer a few tensors of
// fixed size per sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "megatron/tensor/attention/paged_attention.h"
#include "megatron/transformer/layer/state_keeping.h"

namespace megatron {

class Layer;

// Tokens of several sequences, one after another in one row of the model: [1, t] ids, [t, 1, h]
// activations.
struct PartDrafts {
  int64_t drafts = 0;  // its last so many rows may not stand
  int64_t stood = 0;   // so many positions before it were drafts of its sequence's part before
};
struct RaggedBatch {
  PagedRows rows;
  std::vector<int64_t> slots;  // by part: which state of fixed size is that of its sequence
  int64_t num_slots = 0;       // that there are
  std::vector<PartDrafts> drafts = {};  // by part; empty: none has any
  // Rows whose embeddings of words are given: their indices [m] int64, and [m, h].
  at::Tensor given_rows = {}, given_values = {};
};

// State of one layer for all sequences. Memory is allocated by the layer's forward, in the type of
// its activations, and enlarged when a batch has more blocks or slots than those before. A part
// that starts at position 0 starts anew, whatever its blocks and its slot held.
class LayerState {
 public:
  virtual ~LayerState() = default;
  // What is held, always in the same order: by position, in blocks, and by sequence, in slots.
  // Blocks and slots are copied, swapped and dropped with those of the sequence.
  virtual std::vector<PagedBuffer*> paged() { return {}; }
  virtual std::vector<SlotBuffer*> slots() { return {}; }
  // Before the first forward.
  virtual void keep_as(const StateKeeping&) {}
  // Whether rows that may not stand (StateKeeping::drafts) leave what is held in slots as it was.
  virtual bool takes_back() const { return false; }
};

// States of all layers of a model. Not thread safe.
class DecodingState {
 public:
  // The state that `layer` makes for itself when first asked for; null: it keeps none.
  LayerState* of(const Layer& layer);

  // Before the first forward.
  void keep_as(const StateKeeping& keeping) { keeping_ = keeping; }
  // Before the first forward: buffers of blocks measure what is written (PagedBuffer::measure).
  void measure_paged() { measuring_ = true; }

  // Calls f with every buffer, layer by layer.
  void for_each_paged(const std::function<void(PagedBuffer&)>& f) const;
  void for_each_slots(const std::function<void(SlotBuffer&)>& f) const;
  void for_each(const std::function<void(StateBuffer&)>& f) const;

  void clear();             // forgets all sequences and frees the memory
  int64_t bytes() const;    // of the memory held on the device
  bool takes_back() const;  // all layers do that hold something in slots

 private:
  bool measuring_ = false;
  StateKeeping keeping_;
  std::unordered_map<const Layer*, size_t> places_;
  std::vector<std::unique_ptr<LayerState>> states_;  // in the order of the layers; null: keeps none
};

// One forward of decoding.
struct DecodingPass {
  DecodingState& state;
  const RaggedBatch& batch;
  // Tensor ranks divide the rows between the products (tensor_parallel/divided_rows.h), of a model
  // whose layers can: TransformerConfig::can_divide_rows().
  bool divides_rows = false;
};

}  // namespace megatron
