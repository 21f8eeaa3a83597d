// Bytes that one pass of one micro-batch through one chunk of the model holds, from what the
// layers' autograd functions save.
//
// Letters: T = tokens of a rank in attention (s b / c), R = rows between layers (T, or T/t with
// sequence parallelism), e = bytes of the model's type, x = bytes of the residual stream, h f n g d
// as in docs/notation.md, t c the sizes of tensor and context axes, F = 2f when the MLP is gated,
// else f; G = max(1, g/t) groups on a rank, N = n/t heads; k = 2 for LayerNorm, 1 for RMSNorm.
//
// Saved per layer (tensor_parallel/layers.cc, transformer/attention/attention.cc,
// tensor/attention.cc, tensor/activation.cc):
//   residual stream  2 R h x                inputs of the norms; the second one's is the sum after
//                                           attention
//   norms            2 R (h e + 4 k)        normed inputs (not with --recompute-modules layernorm)
//                                           and statistics
//   attention        T d e (N + 2 G)        product of linear_qkv: the values; what is used in
//                                           place keeps the whole product
//                    + T N d e              queries, if rotated, normed or regrouped
//                    + T G d e              keys, if rotated or normed
//                    + T d e (N + G) + 4 k T (N + G)
//                                           with --qk-layernorm: inputs and statistics of the norms
//                    + T N d e              output, which linear_proj saves too
//                    + 4 T N                log-sum-exp of a library's kernel (not with
//                                           --recompute-modules core_attn)
//                    a2a                    T d e (N + 2 lcm(G, a)) of exchanged tokens instead of
//                                           queries, keys and values, and the output twice
//   MLP              T F e / t + T f e / t  products of linear_fc1 and of the activation (the
//                    latter
//                                           not with --recompute-modules mlp_act); none with mlp,
//                                           which saves no second norm either
//   document mask    b s^2                  bool, where attention takes a mask: documents, at one
//                                           context rank or with a2a
// Ends:
//   embedding        8 T                    token ids
//   head             R h x + 4 k R          input and statistics of the final norm
//                    + T h e + T v e / t    input of the output layer; logits, overwritten by their
//                                           gradient
//                    + 20 T                 targets, log-sum-exp, loss mask
// Full recomputation: R h x per recomputed unit, divided by t with --distribute-saved-activations;
// in the backward, one unit at a time is held as above. With --recompute-modules mlp a unit is the
// second half of a layer.
// Offloading: what --offload-modules names is not held. In the forward,
// --fine-grained-offloading-max-inflight-offloads half layers are still held next to the running
// one; in the backward the next one is already held.
// Dropout saves nothing: masks are drawn again by position.
//
// Between the passes I and W of a zero-bubble schedule each linear layer holds its input and the
// gradient of its product.
#pragma once

#include <cstdint>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

// What one layer, or a chunk, saves, by kind.
struct SavedBytes {
  int64_t residual = 0;
  int64_t norms = 0;
  int64_t attention = 0;
  int64_t mlp = 0;
  int64_t ends = 0;  // embedding, final norm, head, loss
  int64_t total() const { return residual + norms + attention + mlp + ends; }
  SavedBytes& operator+=(const SavedBytes& other);
  SavedBytes& operator-=(const SavedBytes& other);
};

struct PassBytes {
  SavedBytes saved;       // from F to B, or to I, on the device
  int64_t offloaded = 0;  // the same in host memory
  // Of those, what is still on the device when F is over, until another pass begins
  int64_t leaving = 0;
  int64_t pending = 0;        // from I to W
  int64_t forward_extra = 0;  // most beyond `saved` while F runs
  // Most beyond `saved` while B or I runs, the arriving gradient not counted
  int64_t backward_extra = 0;
  int64_t backward_first =
      0;  // of that, before a backward has used as many groups as may be leaving
  // Most beyond `pending` while I runs: attention of the first layer, which comes last
  int64_t deferred_extra = 0;
};

PassBytes pass_bytes(const LayoutPlan& plan, int stage, int chunk);

// What the passes H and L hold with the vocabulary over the stages: R h x of the hidden states from
// the call on, then instead of them, from H to L, T h e + T v e / (t P) + 20 T + 12 T statistics
// and those of all t P ranks.
struct VocabularyBytes {
  int64_t hidden = 0;      // of one micro-batch as it travels, and of its gradient
  int64_t held = 0;        // from H to L
  int64_t head_extra = 0;  // most beyond `hidden` while H runs
  int64_t loss_extra = 0;  // most beyond `held` while L runs
};
VocabularyBytes vocabulary_bytes(const LayoutPlan& plan);

// Of one layer without recomputation of the whole layer; layers count from 1.
SavedBytes layer_saved_bytes(const LayoutPlan& plan, int64_t layer_number);

}  // namespace megatron
