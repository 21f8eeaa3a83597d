// What one pass over one micro-batch needs besides its activations.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/random.h"

namespace megatron {

class KVCache;
class ProcessGroup;
class OffloadedPass;
class RecomputeTape;

struct ForwardContext {
  bool training = false;  // dropout is on
  // Of the tokens, sample [b] and position [s]: for attention and the default position ids.
  TokenPositions place;
  // Of the activations between layers: position [s/t] with sequence parallelism. Undefined: the
  // same as `place`.
  TokenPositions rows;
  int64_t first_row = 0;      // index of the first of them in the sequence of this rank
  at::Tensor position_ids;    // [b, s] int64; undefined: place.position for every row
  at::Tensor attention_mask;  // bool [b, 1, s, s], True = may NOT attend, beyond causality;
                              // undefined: none. Only at one context-parallel rank
  at::Tensor document_ids;    // [b, s] int64 of the whole sequence on every context-parallel rank:
                              // tokens attend within their document only; undefined: no borders
  // [] training: what the backward will give the sum of the losses, where it is known before;
  // undefined: it is not
  at::Tensor loss_grad;
  const ProcessGroup* cp =
      nullptr;  // the ranks that hold the sequences of this pass; null: those of the mesh
  KVCache* cache = nullptr;          // decoding: keys and values of earlier positions
  RecomputeTape* tape = nullptr;     // training: where recomputed parts are noted
  OffloadedPass* offload = nullptr;  // training: where offloaded activations are noted
};

}  // namespace megatron
