// What the ends of a model cost a rank: embedding, final norm, output layer and loss. Letters as in
// transformer/layer/layer_cost.h, v the rows of the vocabulary with padding.
//
// Saved:
//   embedding        8 T                    token ids
//   head             R h x + 4 k R          input and statistics of the final norm
//                    + T h e + T v e / t    input of the output layer; logits, overwritten by their
//                                           gradient
//                    + 20 T                 targets, log-sum-exp, loss mask
//   each depth of multi-token prediction
//                    8 T + 4 R h e          token ids; embedding, inputs of the projection and of
//                                           the last norm
//                    + 12 k R               statistics of three norms
//                    + layer + head         without the head's norm
// With full recomputation, uniform, a depth saves its columns, and from the second on 2 R h e.
// With the vocabulary split over the stages, the segment with the head ends after the final norm.
// From the broadcast on, every stage holds R h x of hidden states; from H to L, in their place,
// T h e + T v e / (t P) + 20 T, and softmax statistics of 12 T for this rank and for each of the
// t P ranks.
//
// Sent over the tensor ranks:
//   embedding        T h e all-reduced (with sequence parallelism reduce-scattered, and gathered
//                    backward)
//   head             T h of the gradient (with sequence parallelism gathered, and scattered
//                    backward)
//   loss             three fp32 numbers per token
//   each depth of multi-token prediction   as embedding, layer, head and loss; 2 T h e all-reduced
//                    backward (with sequence parallelism gathered, and gathered and scattered
//                    backward), T h e gathered (and gathered backward)
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

struct ModelConfig;
struct StageSlice;

// `vocabulary`: rows with padding; `vocabulary_stages`: pipeline stages that they are divided over.
struct EndsShape {
  LayerShape layer;
  int64_t vocabulary = 0;
  int64_t vocabulary_stages = 1;
  // Whether a parameter whose name begins so is trained; empty: all are
  std::function<bool(std::string_view)> trains = {};
  // Of models with encoders of media: whose part of them is counted; null: all of the model is one
  const StageSlice* segment = nullptr;
};

// What an end adds to the segment that it belongs to.
struct EndCost {
  int64_t saved = 0;
  int64_t pending = 0;  // between the passes I and W
  // Peaks in addition to `saved`, while it runs: after the layers, and backward before them; of the
  // embedding before them, and backward after them. Of the head: those of its final norm, and of
  // output layer and loss
  int64_t norm_forward_peak = 0, norm_backward_peak = 0;
  int64_t forward_peak = 0, backward_peak = 0;
  Traffic tensor, context, expert, expert_tensor;
};

// The passes H and L of a stage when the vocabulary is split over the stages.
struct SplitHeadCost {
  int64_t hidden = 0;      // hidden states of one micro-batch, and also their gradient
  int64_t held = 0;        // from H to L
  int64_t head_extra = 0;  // peak in addition to `hidden` while H runs
  int64_t loss_extra = 0;  // peak in addition to `held` while L runs
  int64_t statistics = 0;  // softmax statistics of one part of the vocabulary
  Traffic tensor;
};

// What a model has besides its language model, on the segment: the work of a micro-batch on the
// rank that has most of it.
struct ModuleCost {
  std::string name;                        // its parameters' names begin so: "vision_model."
  double weights = 0, scores = 0;          // multiply-adds, as of SublayerCost
  double moved = 0;                        // elements
  double again = 0;                        // multiply-adds that the backward computes again
  bool weight_grads = true, grads = true;  // whether a backward computes those; any
};

// A column of model_table.h.
struct EndsCost {
  EndCost embedding;  // and the encoders of media
  // Of `embedding.saved`: an encoder of media, and its features up to the language model
  int64_t encoder = 0, features = 0;
  int64_t media = 0;  // of a micro-batch besides `batch`, on the segment with the embedding
  // With --mimo-encoder-prefetch, of a segment with a frozen encoder: micro-batches that have
  // features before their turn, bytes of those of one, whether what is saved are these, and what
  // the encoder allocates meanwhile, on a GPU beside all else
  struct Ahead {
    int64_t microbatches = 0, features = 0, peak = 0;
    bool saved = false;
  } ahead;
  // With --encoder-offload-modules, of the encoder's inputs of recomputed units and half layers in
  // the order of the forward: what goes to host memory. Empty: nothing does
  std::vector<OffloadedBytes> offloaded;
  // What crosses a border within an encoder, and behind it
  int64_t media_rows = 0, media_features = 0;
  std::vector<ModuleCost> modules;
  // Final norm, multi-token prediction, output layer and loss; with the vocabulary split over the
  // stages the norm alone
  EndCost head;
  double head_products = 0;  // multiply-adds per token of the sequence, over all ranks
  SplitHeadCost split_head;  // zeros unless the vocabulary is split over the stages
  int64_t batch = 0;         // columns of a micro-batch
  // Of two stacks: the layers of the first one, what is saved behind them besides what layers save,
  // and how much of that every later segment holds, too. Zeros: there is one stack
  int64_t first_stack = 0, between_stacks = 0, passed_on = 0;
  // Bytes beside the stream, which move or are made anew by each segment, from behind layer
  // `passed_from` to layer `passed_until`, which reads them last. Zeros: there are none
  int64_t passed_from = 0, passed_until = 0, passed_beside = 0;
};

// Of a model with tokens, labels and a loss mask, whose ends are those of common/.
EndsCost language_ends_cost(const ModelConfig& config, const EndsShape& shape);

}  // namespace megatron
