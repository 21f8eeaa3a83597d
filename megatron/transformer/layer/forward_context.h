// Inputs of one forward over one micro-batch besides its activations.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "megatron/tensor/random.h"
#include "megatron/transformer/layer/token_weights.h"

namespace megatron {

class AuxiliaryLosses;
class ProcessGroup;
class OffloadedPass;
class RecomputeTape;
struct DecodingPass;
struct EncodedSequence;
struct RetrievedChunks;
struct RoutingReplay;
struct TokenBlocks;
struct UnpaddedRows;

struct ForwardContext {
  bool training = false;  // dropout is on
  // Sample [b] (without padding [R]) and position [s] of the tokens, for attention and the default
  // position ids.
  TokenPositions place;
  // The same for activations between layers, [s/t] with sequence parallelism. Undefined: the
  // same as `place`.
  TokenPositions rows;
  int64_t first_row = 0;        // index of the first such activation in this rank's sequence
  at::Tensor position_ids;      // [b, s] int64; undefined: place.position for every row
  at::Tensor attention_mask;    // bool [b, 1, s, keys] of whole sequences, True = may NOT attend,
                                // beyond causality; undefined: none
  bool mask_is_causal = false;  // the mask says which later keys are seen: causality adds nothing
  // Blocks of tokens that see one another in both directions, and what makes the mask of them, with
  // which attention is not causal, for layers whose kernels do not know blocks; null: there are
  // none
  std::shared_ptr<const TokenBlocks> token_blocks;
  std::function<at::Tensor()> mask_of_blocks;
  at::Tensor document_ids;  // [b, s] int64 of the whole sequence on every context-parallel rank:
                            // tokens attend within their document only; undefined: no boundaries
  // make_document_rows() of document_ids; null: not known
  std::shared_ptr<const UnpaddedRows> document_rows;
  // [s, b] int64 document_runs() (transformer/ssm/causal_conv.h) of document_ids; from
  // TransformerBlock on, if layers with states are among its own
  at::Tensor document_runs;
  // The rows of the samples without padding, [R, 1, ...] in the place of [s, b, ...]: tokens attend
  // within their sample. With it places of rows, and neither a mask nor document ids, at one
  // context-parallel rank. Null: samples have padding, or none.
  std::shared_ptr<const UnpaddedRows> unpadded;
  // The same rows as those of parts of the samples, for layers in which tokens attend within their
  // part (AttentionConfig::whole_sample_layers). Null: there are no such layers.
  std::shared_ptr<const UnpaddedRows> unpadded_parts;
  // [n/t, 2 s - 1] fp32 (fp64): what self-attention adds to its scores by the distance of query and
  // key (AttentionOptions::distance_bias); undefined: nothing
  at::Tensor distance_bias;
  // What cross attention reads (transformer/attention/cross_attention.h); null: nothing.
  std::shared_ptr<const EncodedSequence> encoded;
  // What chunked cross attention reads (transformer/attention/chunked_cross_attention.h); null:
  // nothing.
  std::shared_ptr<const RetrievedChunks> retrieved;
  // []: gradient of the loss sum (the loss scale), if known before the forward; lets the fused
  // output layer compute gradients in the forward. Undefined: not known.
  at::Tensor loss_grad;
  // Context-parallel group of this micro-batch's sequences; null: that of the mesh.
  const ProcessGroup* cp = nullptr;
  // Decoding: the tokens are those of a ragged batch, and layers keep what later ones need. With it
  // position_ids, and neither a mask nor document ids.
  const DecodingPass* decoding = nullptr;
  // training: receives losses besides the main one; null: none are wanted
  AuxiliaryLosses* auxiliary_losses = nullptr;
  TokenWeights tokens;  // of this micro-batch, for those losses and for statistics of tokens
  // A training pass of which no result is kept, not even a statistic: kernels are loaded by it.
  bool discarded = false;
  int64_t layer_use = 0;  // which use of a layer that one pass uses several times, from 0
  const RoutingReplay* routing = nullptr;  // choices of routers to record or impose; null: neither
  RecomputeTape* tape = nullptr;           // training: records what is recomputed
  OffloadedPass* offload = nullptr;        // training: records what is offloaded
};

}  // namespace megatron
