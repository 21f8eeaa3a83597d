// Cross attention: queries of a decoder's tokens over keys and values of an encoder's output.
#pragma once

#include <memory>

#include "megatron/nn/norm.h"
#include "megatron/tensor/attention/attention.h"
#include "megatron/transformer/attention/kv_cache.h"
#include "megatron/transformer/layer/sublayer.h"

namespace megatron {

struct ParallelGroups;

// What the layers of a decoder read of the sequences that an encoder has read.
struct EncodedSequence {
  // Of this context rank, in the model's type: [s_e/c, b, h], with sequence parallelism
  // [s_e/(c t), b, h]
  at::Tensor states;
  // Of the whole sequence: [s_e] int64; bool [b, s_e], True = is not attended to (undefined: all
  // are)
  at::Tensor position, mask;
  // Without padding: states are [R_e, 1, h], those of the decoder ForwardContext::unpadded; null:
  // both have padding, or none
  std::shared_ptr<const UnpaddedRows> rows = nullptr;
  // Where the queries are if k b sequences of them read b sequences, the first of k readers of each
  // first: b samples, s k positions. Undefined: each sequence has one reader
  TokenPositions readers = {};
};

// What a decoder layer keeps for decoding: keys and values of earlier positions, and those of the
// encoder's output of each sequence, which are computed once.
class CrossKVCache final : public KVCache {
 public:
  std::vector<SlotBuffer*> slots() override { return {&keys_and_values, &lengths}; }
  bool takes_back() const override { return true; }  // no row of the decoder changes them
  SlotBuffer keys_and_values;                        // [slots, rows, n/t, 2 d]
  SlotBuffer lengths;                                // [slots, 1] int64: rows that are in use
};

// The second sublayer of a decoder layer: norm, query projection, key and value projection of
// ForwardContext::encoded, attention without causality and without positions, output projection.
//
// Parameters: linear_q.{weight, bias}, linear_kv.{weight, bias}, linear_proj.{weight, bias}. Rows
// of linear_kv are stored per head, as in Megatron: [key | value]. The norm of the input is the
// layer's.
//
// Communication: that of its linears over tp; linear_kv sums the gradient of the encoder's output.
// With several context ranks, whose queries are those of their own tokens, every --cp-comm-type
// gathers keys and values of the whole encoder's output over cp, and sums their gradients.
// Keeps references to config and groups, which must outlive it.
class CrossAttention : public Sublayer {
 public:
  // `layer_number` keys the draws of dropout. Throws Error when the heads do not divide over the
  // tensor ranks.
  CrossAttention(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                 const ParallelGroups& groups);
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;
  Norm* input_norm() override { return norm_.get(); }

  // Decoding: a CrossKVCache, and the keys and values of an encoder's output [n, 1, h] for a slot
  // of it. forward() then reads those of each row's sequence.
  std::unique_ptr<LayerState> make_state() const { return std::make_unique<CrossKVCache>(); }
  void keep(const at::Tensor& encoded, LayerState& state, const SequenceSlot& slot);

 protected:
  // For the queries at `place`; without causality.
  AttentionOptions attention_options(const ForwardContext& pass, const TokenPositions& place,
                                     const at::Tensor& key_position) const;
  const ProcessGroup& context_ranks(const ForwardContext& pass) const;
  // q [s, b, n d], kv [s_e, b, 2 n d] -> [s, b, n, d]
  at::Tensor attend(const at::Tensor& q, const at::Tensor& kv,
                    const AttentionOptions& options) const;

  const TransformerConfig& config_;
  const ParallelGroups& parallel_;
  int64_t heads_, first_head_;  // of this rank
  std::unique_ptr<Norm> norm_;  // null: none
  ColumnParallelLinear linear_q_, linear_kv_;
  RowParallelLinear linear_proj_;

 private:
  // In `type`, that of what they attend to.
  at::Tensor queries(const at::Tensor& x, at::ScalarType type, OffloadedPass* offload);
  SublayerOutput project_back(const at::Tensor& y, const at::Tensor& x, bool add,
                              OffloadedPass* offload);
  at::Tensor attend_kept(const at::Tensor& q, CrossKVCache& kept, const RaggedBatch& batch) const;
  at::Tensor attend_encoded(const at::Tensor& q, const at::Tensor& kv,
                            const EncodedSequence& encoded, const ForwardContext& pass) const;

  RandomKey dropout_key_;
};

}  // namespace megatron
