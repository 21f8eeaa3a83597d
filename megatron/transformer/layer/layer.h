// What every layer of a transformer is, whatever it computes. The kinds: transformer/layer_kinds.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "megatron/nn/module.h"
#include "megatron/transformer/layer/forward_context.h"
#include "megatron/transformer/layer/layer_state.h"

namespace megatron {

struct RotaryTables {
  at::Tensor cos, sin;  // [s, r] or [s, b, r], fp32 (fp64); undefined: no rotary embedding
  bool interleaved = false;
};

// The tables of all layers for one forward.
struct LayerRotary {
  RotaryTables all;
  RotaryTables local;  // for layers with rotary_base_local; undefined: there are none
  const RotaryTables& of(bool is_local) const { return is_local ? local : all; }
};

// Inputs of one layer besides its activations. All but the last two are those of all layers of one
// forward, computed once.
struct LayerContext {
  const ForwardContext& pass;
  LayerRotary rotary;
  bool offloaded = false;       // this layer's activations go to host memory
  LayerState* state = nullptr;  // decoding: what this layer's make_state() returned
  // Where this layer's saved activations are offloaded; null: they stay on the device.
  OffloadedPass* offload() const { return offloaded ? pass.offload : nullptr; }
};

// Of a sequence that is decoded.
struct SequenceSlot {
  int64_t slot = 0, num_slots = 1;
  int64_t most = 0;  // rows of an encoder's output
};

// A forward is a pure function of x, parameters, token positions and, in decoding, the state: it
// may run again in the backward (docs/design/layers.md).
class Layer : public Module {
 public:
  // `layer_number` is global and counts from 1.
  explicit Layer(int64_t layer_number) : layer_number_(layer_number) {}
  int64_t layer_number() const { return layer_number_; }

  //   x, return   [s, b, h]   (s/t with sequence parallelism), in fp32 with
  //                           --fp32-residual-connection
  virtual at::Tensor forward(const at::Tensor& x, const LayerContext& context) = 0;

  // What this layer keeps of earlier positions in decoding; null: nothing.
  virtual std::unique_ptr<LayerState> make_state() const { return nullptr; }
  // What this layer keeps of an encoder's output [n, 1, h] for the sequence of a slot, before its
  // first position; the memory is that of `most` rows. Without a row nothing but memory is made.
  // Only of layers with cross attention.
  virtual void keep_encoded(const at::Tensor& encoded, LayerState& state, const SequenceSlot& slot);

 private:
  int64_t layer_number_;
};

}  // namespace megatron
