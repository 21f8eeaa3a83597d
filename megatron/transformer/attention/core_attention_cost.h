// What core attention costs a rank, whatever makes its queries, keys and values. Letters as in
// transformer/layer/layer_cost.h; d and v are the widths of a key and of a value head.
//
// Sent over the context ranks, with K = bytes of this rank's keys and values, W the same in fp32, Q
// of its queries and its output:
//   p2p         (c-1) K forward, (c-1) K + c W backward
//   all_gather  (c-1) K forward, (c-1) (K + W) backward
//   a2a         (c-1)/c (Q + K) forward and again backward
//   a2a+p2p     a2a over the inner ranks, then p2p over the outer ones
// With core_attn recomputed, p2p and all_gather of the forward again.
#pragma once

#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

enum class AttentionKernel { kLibrary, kUnfused, kRing, kAllGather };

// Heads of one rank, and the widths of one of each.
struct CoreAttentionSizes {
  int64_t heads = 1, groups = 1;
  int64_t key = 1, value = 1;
  bool packed = false;  // queries, keys and values are views of one tensor (packed_attention)
  // Tokens that a rank attends to without causality, as by cross attention, for which keys and
  // values of all context ranks are gathered; 0: those of the queries, as causality lets
  int64_t others = 0;
};

// Whether kernels attend within blocks of tokens (LayerShape::block_tokens), of heads of that size,
// else by a mask of bools that all layers of a micro-batch share: [b, 1, s, s].
bool takes_token_blocks(const TransformerConfig& config, const LayerShape& shape, int64_t head);

// Core attention of one layer on one rank; tensors in bytes.
struct CoreAttentionCost {
  // Layers count from 1. Keeps references to config and shape.
  CoreAttentionCost(const TransformerConfig& config, int64_t layer, const LayerShape& shape,
                    const CoreAttentionSizes& sizes);

  const TransformerConfig& config;
  const LayerShape& shape;
  // At borders of documents, from padding, which encoders see, or by blocks of tokens
  const bool masked;
  const bool by_distance;      // relative positions are added to the scores
  bool windowed = false;       // a query does not see all keys before it
  bool narrow_window = false;  // one that a kernel of our own takes on a GPU
  const CoreAttentionSizes sizes;
  const bool in_blocks;        // kernels attend within blocks of tokens
  const int64_t sequence;      // tokens of the queries; of cross attention, of this rank's
  const int64_t key_sequence;  // tokens that are attended to
  const int64_t wide;          // bytes of an fp32 element over those of the model's type
  int64_t q, k, v, out;
  int64_t lse;
  int64_t a2a = 1;    // ranks of the all-to-all
  int64_t outer = 1;  // ranks of the ring or the gather
  int64_t exchanged = 0;
  int64_t mask = 0;
  int64_t block_scores = 0;  // scores of p2p and all_gather blocks computed without a library
  // of all_gather, gradients of a bias by distance, each row at its place among all distances
  int64_t block_distances = 0;
  bool gathers = false;  // all_gather
  AttentionKernel kernel = AttentionKernel::kLibrary;

  // Saves a log-sum-exp, and apart from the input of linear_proj an output.
  bool saves_library() const {
    return kernel != AttentionKernel::kUnfused && !config.recomputes("core_attn");
  }
  bool has_sinks() const { return config.softmax_type != SoftmaxType::kVanilla; }
  // A library's output as wide as keys, where it takes values padded to that; else 0.
  int64_t padded_out() const;
  // The input of linear_proj, and what the backward needs of the forward besides queries, keys and
  // values, or besides their exchanged copies.
  int64_t saved() const;

  // Temporaries in the forward besides inputs and output, in the backward besides gradients.
  int64_t forward_extra() const;
  int64_t backward_extra() const;

  // Before context parallelism divides it.
  AttentionSize attention(int64_t layer) const;

  Traffic context_traffic() const;
  // Multiply-adds per token of the sequence, over all ranks of the layer: of queries with keys and
  // of their scores with values.
  double score_products() const;

 private:
  // A mask of keys, the same for all queries, which a kernel on a GPU takes (attention_masked.h)
  bool takes_mask() const;
  bool is_unfused() const;
  int64_t of_blocks(int64_t bytes) const;
  int64_t block_lse() const;
  int64_t blocks_forward() const;
  int64_t blocks_backward() const;
  void divide_context(int64_t layer);
  int64_t score_bytes() const;
  int64_t copied(int64_t bytes) const;
  int64_t limits_bytes() const;
  int64_t distances_extra() const;
  int64_t repeated_groups() const;
  int64_t backward_copies() const;
  Traffic ring_traffic(int64_t ranks, double keys) const;
};

}  // namespace megatron
