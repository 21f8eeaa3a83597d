// Multi-latent attention (MLA): low-rank latents of queries, and of keys with values, of which
// decoding keeps the latter only.
//
//   q       = W_q x, or W_uq norm(W_dq x) with --q-lora-rank   per head [plain | rotated]
//   [c | r] = W_dkv x                                          r: one rotated key for all heads
//   [k | v] = W_ukv norm(c)                                    per head [plain key | value]
//   out     = W_o softmax(scale [q_plain | rot(q_rotated)] [k | rot(r)]) v
//
// The norms of latents exist with --qk-layernorm; only W_o has a bias.
//
// Source: DeepSeek-V2 (arXiv:2405.04434) section 2.1; Megatron's MLASelfAttention.
#pragma once

#include <memory>

#include "megatron/nn/saved_tensors.h"
#include "megatron/transformer/attention/attention_sublayer.h"
#include "megatron/transformer/attention/core_attention.h"
#include "megatron/transformer/attention/latent_heads.h"

namespace megatron {

// Parameters: linear_q_proj.weight, or linear_q_down_proj.weight and linear_q_up_proj.{weight,
// layer_norm_*}; linear_kv_down_proj.weight [kv rank + rotated, h]; linear_kv_up_proj.{weight,
// layer_norm_*}; linear_proj.{weight, bias}. The norm of the input is input_norm().
//
// Heads are divided over the tensor-parallel ranks. The down projections are not: each rank
// multiplies the rows that it has between layers.
//
// Communication: that of its linears over tp; with sequence parallelism an all-gather of r, and a
// reduce-scatter of its gradient; without, an all-reduce of its gradient; that of attention over
// cp. Keeps a reference to groups, which must outlive it.
class MultiLatentAttention : public AttentionSublayer {
 public:
  MultiLatentAttention(const TransformerConfig& config, int64_t layer_number,
                       bool sequence_parallel, const ParallelGroups& groups);
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;
  Norm* input_norm() override { return input_norm_.get(); }
  // [norm(c) | rot(r)] of earlier positions: a LatentCache.
  std::unique_ptr<LayerState> make_state() const override;

 private:
  // Latents of queries (or the normed input, without) and of keys; r of the rows of all ranks.
  struct Latents {
    at::Tensor q, c, r;
    SavedTensorScope::Restore q_again;  // computes q again; empty: it is saved
  };
  // From the input to the output of core attention, [s, b, n, v].
  at::Tensor project_and_attend(const at::Tensor& x, const LayerContext& context);
  Latents project_down(const at::Tensor& normed);
  LatentHeads project_up(const Latents& latents, const RotaryTables& rotary);
  // What --recompute-modules mla_up_proj keeps of the heads: the latents.
  SavedTensorScope::Keep keep_latents(const LatentHeads& heads, const Latents& latents,
                                      const RotaryTables& rotary);
  at::Tensor queries(const at::Tensor& q);
  // Core attention over the keys and values of the latents, [s, b, n, v].
  at::Tensor attend(const Latents& latents, const RotaryTables& rotary,
                    const LayerContext& context);
  // The same over the latents of a cache, without gradients. See Note [Latents of a cache].
  at::Tensor attend_cached(const Latents& latents, const RotaryTables& rotary,
                           const LayerContext& context);

  const TransformerConfig& config_;
  int64_t layer_number_;  // from 1
  const ProcessGroup& tp_;
  bool sequence_parallel_;
  LatentHeadSizes sizes_;
  CoreAttention core_;
  std::unique_ptr<Norm> input_norm_;
  std::unique_ptr<ColumnParallelLinear> linear_q_proj_, linear_q_down_proj_, linear_q_up_proj_;
  ColumnParallelLinear linear_kv_down_proj_, linear_kv_up_proj_;
  RowParallelLinear linear_proj_;
};

}  // namespace megatron
