// What recurrent sublayers have in common of their costs on one rank.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// Tensors in bytes.
struct RecurrentTensors {
  StreamCost around;
  int64_t mixed;           // output of in_proj
  int64_t y;               // input of the norm before out_proj, and its output
  int64_t o_saved;         // input of out_proj; 0: made again
  int64_t saved;           // by what lies between the linears, with `mixed`
  int64_t forward_extra;   // temporaries there
  int64_t backward_extra;  // and in the backward, besides the gradient of y

  void forward(AllocationTrack& track) const;
  int64_t unrecorded_peak() const;
  void backward(AllocationTrack& track) const;
};

// Memory, and traffic of the tensor ranks for the linears. Layers count from 1. `recompute`: the
// whole sublayer is computed again.
SublayerCost recurrent_cost(const TransformerConfig& config, int64_t layer_number,
                            const LayerShape& shape, const RecurrentTensors& tensors,
                            bool recompute);

}  // namespace megatron
