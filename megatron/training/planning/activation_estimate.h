// Bytes that one micro-batch holds in one model chunk, derived from what the layers' autograd
// functions save.
//
// Letters: T = tokens of a rank in attention (s b / c), R = tokens of a rank between layers (T, or
// T/t with sequence parallelism), e = bytes per element of the model's type, x = of the residual
// stream, h f n g d as in docs/notation.md, t c the sizes of tensor and context axes, F = 2f when
// the MLP is gated, else f; G = max(1, g/t) groups on a rank, N = n/t heads; k = 2 for LayerNorm, 1
// for RMSNorm.
//
// Saved per layer (tensor_parallel/layers.cc, transformer/attention.cc,
// tensor/attention/attention.cc, tensor/activation.cc):
//   residual stream  2 R h x                inputs of the two norms
//   norms            2 R (h e + 4 k)        outputs (not with --recompute-modules layernorm) and
//                                           statistics
//   attention        T d e (N + 2 G)        output of linear_qkv: as a whole if attention uses
//                                           views of it, else only the values
//                    + T N d e              queries, if rotated, normed or regrouped
//                    + T G d e              keys, if rotated or normed
//                    + T d e (N + G) + 4 k T (N + G)
//                                           with --qk-layernorm: inputs and statistics of the norms
//                    + T N d e              output, which linear_proj saves too
//                    + 4 T N                log-sum-exp of a library's kernel (not with
//                                           --recompute-modules core_attn)
//                    a2a                    T d e (N + 2 lcm(G, a)) of exchanged tokens instead of
//                                           queries, keys and values, and the output twice
//   MLP              T F e / t + T f e / t  outputs of linear_fc1 and of the activation (the latter
//                                           not with --recompute-modules mlp_act); none with mlp,
//                                           which does not save the second norm either
//   document mask    b s^2                  bool, if attention takes a mask: documents, with one
//                                           context rank or with a2a
// Ends:
//   embedding        8 T                    token ids
//   head             R h x + 4 k R          input and statistics of the final norm
//                    + T h e + T v e / t    input of the output layer; logits, overwritten by their
//                                           gradient
//                    + 20 T                 targets, log-sum-exp, loss mask
// Full recomputation: R h x per recomputed unit, divided by t with --distribute-saved-activations;
// in the backward, one unit at a time is held as above. With --recompute-modules mlp a unit is the
// MLP half of a layer.
// Offloading: activations that --offload-modules names are not held. In the forward, up to
// --fine-grained-offloading-max-inflight-offloads half layers are still in transfer in addition to
// the running one; in the backward the next one has already been reloaded.
// Dropout saves nothing: masks are regenerated, keyed by position.
//
// Between the passes I and W of a zero-bubble schedule each linear layer holds its input and the
// gradient of its output.
#pragma once

#include <cstdint>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

// Bytes that one layer, or a chunk, saves, by kind.
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
  SavedBytes saved;       // on the device, from F to B (or I)
  int64_t offloaded = 0;  // in host memory, from F to B (or I)
  // Of `offloaded`, bytes still in transfer from the device at the end of F, until another pass
  // begins
  int64_t leaving = 0;
  int64_t pending = 0;        // from I to W
  int64_t forward_extra = 0;  // peak in addition to `saved` while F runs
  // Peak in addition to `saved` while B or I runs, without the output gradient passed in
  int64_t backward_extra = 0;
  int64_t backward_first = 0;  // the same while transfers to the host may still be in flight
  // Peak in addition to `pending` while I runs: in attention of the first layer, which runs last
  int64_t deferred_extra = 0;
};

PassBytes pass_bytes(const LayoutPlan& plan, int stage, int chunk);

// Bytes of the passes H and L when the vocabulary is split over the stages: R h x of hidden states
// from the broadcast on; from H to L, in their place, T h e + T v e / (t P) + 20 T, and softmax
// statistics of 12 T for this rank and for each of the t P ranks.
struct VocabularyBytes {
  int64_t hidden = 0;      // hidden states of one micro-batch, and also their gradient
  int64_t held = 0;        // from H to L
  int64_t head_extra = 0;  // peak in addition to `hidden` while H runs
  int64_t loss_extra = 0;  // peak in addition to `held` while L runs
};
VocabularyBytes vocabulary_bytes(const LayoutPlan& plan);

// Saved bytes of one layer that is not fully recomputed; layers count from 1.
SavedBytes layer_saved_bytes(const LayoutPlan& plan, int64_t layer_number);

}  // namespace megatron
