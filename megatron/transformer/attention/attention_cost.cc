#include "megatron/transformer/attention/attention_cost.h"

#include <algorithm>

#include "megatron/transformer/attention/core_attention_cost.h"
#include "megatron/transformer/attention/multi_latent_attention_cost.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {

namespace {

CoreAttentionSizes core_sizes(const TransformerConfig& c, const LayerShape& s) {
  CoreAttentionSizes sizes;
  sizes.heads = c.num_attention_heads / s.tensor;
  sizes.groups = std::max<int64_t>(1, c.query_groups() / s.tensor);
  sizes.key = sizes.value = c.kv_channels;
  sizes.packed = !c.qk_layernorm && !c.attention_output_gate && s.tensor <= c.query_groups() &&
                 s.context == 1 && !(s.block_tokens > 0 && s.on_gpu);
  return sizes;
}

// The attention of one layer on one rank; tensors in bytes.
struct Attention : CoreAttentionCost {
  Attention(const TransformerConfig& config, int64_t layer, const LayerShape& shape);

  const StreamCost around;
  int64_t sharing;     // ranks that share one KV group
  int64_t own_mixed;   // output of linear_qkv
  int64_t mixed;       // ... gathered, if several ranks share a KV group
  int64_t head_stats;  // statistics of both norms of --qk-layernorm
  bool packed;         // attention reads `mixed` directly (packed_attention)
  bool q_in_place;     // queries are a view of `mixed`
  bool new_q, new_k;   // rotated or normed into new tensors

  bool copies_q() const { return new_q || !q_in_place; }
  // The copy of the gates, where they are no view of `mixed`; the gated output, besides `out`.
  int64_t gate_copy() const { return config.attention_output_gate && !q_in_place ? q : 0; }
  int64_t gated_output() const { return config.attention_output_gate ? q : 0; }
  int64_t saved() const;

  OffloadedBytes offloaded() const;
  void forward(AllocationTrack& track) const;
  void backward(int64_t not_reloaded, AllocationTrack& track) const;
  int64_t unrecorded_peak() const;
};

Attention::Attention(const TransformerConfig& c, int64_t layer, const LayerShape& s)
    : CoreAttentionCost(c, layer, s, core_sizes(c, s)),
      around(c, s, norms_attention_input(c, layer)),
      sharing(std::max<int64_t>(1, s.tensor / c.query_groups())),
      packed(sizes.packed) {
  const int64_t heads = sizes.heads, groups = sizes.groups;
  const int64_t row = s.tokens * sizes.key * s.element;  // one head of every token
  mixed = row * (heads * sharing * (c.attention_output_gate ? 2 : 1) + 2 * groups);
  own_mixed = mixed / sharing;
  head_stats = !c.qk_layernorm ? 0
                               : s.tokens * (heads + groups) *
                                     (c.normalization == Normalization::kLayerNorm ? 2 : 1) * s.sum;
  const int64_t heads_per_group = heads * sharing / groups;
  q_in_place = sharing == 1 && (heads_per_group == 1 || groups == 1);
  new_q = new_k =
      !packed && (c.qk_layernorm || c.position_embedding_type == PositionEmbedding::kRope);
  if (packed && kernel == AttentionKernel::kLibrary) q_in_place = true;
}

// From the output of linear_qkv to the input of linear_proj.
int64_t Attention::saved() const {
  int64_t saved = CoreAttentionCost::saved() + gated_output() + gate_copy();
  // Inputs and statistics of the norms of --qk-layernorm
  if (config.qk_layernorm) saved += q + k + head_stats;
  // Gates that are a view keep the whole output of linear_qkv.
  const bool views = config.attention_output_gate && q_in_place;
  if (exchanged > 0) return saved + exchanged + (views ? mixed : 0);
  return saved + mixed + (!packed && copies_q() ? q : 0) + (new_k ? k : 0);
}

OffloadedBytes Attention::offloaded() const {
  const int64_t e = shape.element, sum = shape.sum,
                norm_stats = config.normalization == Normalization::kLayerNorm ? 2 : 1;
  OffloadedBytes out;
  const auto add = [&](const char* module, int64_t bytes, int64_t element, int64_t count = 1) {
    return offload(config, module, &SavedBytes::attention, bytes, element, count, out);
  };
  offload(config, "attn_norm", &SavedBytes::residual, around.stream, shape.residual, 1, out);
  if (around.pre_norm) {
    offload(config, "qkv_linear", &SavedBytes::norms, around.recompute_norm ? 0 : around.normed, e,
            1, out);
    offload(config, "qkv_linear", &SavedBytes::norms, around.stats, sum, norm_stats, out);
  }
  if (config.qk_layernorm) {
    add("core_attn", q, e);
    add("core_attn", k, e);
    // Statistics are per head: tensors of T heads and of T groups, each norm_stats times.
    const int64_t of_keys = head_stats * k / (q + k);
    add("core_attn", head_stats - of_keys, sum, norm_stats);
    add("core_attn", of_keys, sum, norm_stats);
  }
  if (exchanged > 0) {
    add("core_attn", exchanged, e, 3);
    if (saves_library()) add("core_attn", q, e);
    if (saves_library()) add("core_attn", lse, sum);
  } else {
    if (!packed && copies_q()) add("core_attn", q, e);
    if (new_k) add("core_attn", k, e);
    // Only the part of linear_qkv's output that attention reads is reloaded.
    if (packed) {
      add("core_attn", mixed, e);
    } else if (add("core_attn", mixed, e, std::max<int64_t>(1, mixed / k))) {
      out.taken += k + (new_k ? 0 : k) + (copies_q() ? 0 : q) - mixed;
    }
    if (saves_library()) add("attn_proj", lse, sum);
  }
  add("attn_proj", q, e);
  return out;
}

void Attention::forward(AllocationTrack& track) const {
  around.column_forward(own_mixed, track);
  if (mixed != own_mixed) {
    track.take(2 * mixed);  // all-gathered, then reordered
    track.give(mixed + own_mixed);
  }
  const int64_t before = track.live() - mixed;
  if (!q_in_place) track.take(q);
  track.take(gate_copy());
  if (config.qk_layernorm) track.take((q_in_place ? q : 0) + k + head_stats + q + k);
  if (!packed && config.position_embedding_type == PositionEmbedding::kRope) track.take(q + k);
  if (exchanged > 0) track.take(2 * exchanged);
  track.take(q + lse);
  track.touch(forward_extra());
  if (exchanged > 0) track.touch(2 * q);
  if (config.attention_output_gate) track.touch(3 * q * wide);  // in fp32, one after the other
  track.give(track.live() - before);
  track.take(saved());
  around.row_forward(0, track);
}

int64_t Attention::unrecorded_peak() const {
  const int64_t gate = config.attention_output_gate ? 3 * q * wide : 0;
  return mixed + (copies_q() ? q : 0) + gate_copy() + (new_k ? k : 0) + exchanged + q +
         std::max({forward_extra(), gate, gated_output() + around.product + around.part});
}

void Attention::backward(int64_t not_reloaded, AllocationTrack& track) const {
  around.row_backward(q, 0, track);
  if (config.attention_output_gate) {
    track.touch(4 * q * wide);
    track.take(q);  // gradient of the gates
    track.give(q);  // once it is in that of `mixed`
  }
  if (exchanged > 0) track.touch(2 * q);
  // Its gradient; queries gathered into one tensor
  if (packed) track.take(mixed + (q_in_place ? 0 : q));
  if (!packed || !shape.on_gpu) track.take(q + 2 * k);
  track.touch(backward_extra());
  if (exchanged > 0) track.touch(2 * exchanged);
  if (new_q) track.touch(q + k);
  if (!packed) track.take(mixed);
  if (packed && !q_in_place) track.give(q);
  // Held for a moment, as if they were not written into that of `mixed`
  if (packed && shape.on_gpu) track.take(q + 2 * k);
  track.give(q + q + 2 * k + saved() - not_reloaded);
  if (mixed != own_mixed) {
    track.touch(mixed + own_mixed);
    track.give(mixed - own_mixed);
  }
  around.column_backward(own_mixed, track);
}

// Per token, forward and backward.
double attention_moved_elements(const TransformerConfig& c, int64_t layer_number) {
  const auto h = static_cast<double>(c.hidden_size),
             a = static_cast<double>(c.num_attention_heads * c.kv_channels),
             k = static_cast<double>(c.query_groups() * c.kv_channels);
  const bool rope = c.position_embedding_type == PositionEmbedding::kRope;
  double elements = kNormElements * h;
  if (rope) elements += 4 * (a + k);
  if (c.add_bias_linear) elements += a + 2 * k + h;
  if (c.attention_output_gate) elements += 3 * a + 5 * a;  // y, gate, o; do, y, gate, dy, dgate
  const QuantizationOptions options = c.quantization(layer_number);
  if (!options.enabled()) return elements;
  // Casts: Note [Bytes of casts] in layer_cost.h. The backward of attention needs its output as it
  // is, too.
  if (options.recipe != QuantizationRecipe::kTensorwise) return elements + a + h;
  elements += h;                                 // result of the norm: x again
  elements += 2 * a;                             // output of attention: read, write quantised
  elements += rope ? a + 3 * k : 2 * a + 4 * k;  // gradients of queries and keys; of values
  return elements + 2 * h;                       // gradient of the residual stream
}

}  // namespace

SublayerCost attention_cost(const TransformerConfig& config, int64_t layer_number,
                            const LayerShape& shape, bool offloaded) {
  if (config.multi_latent_attention)
    return multi_latent_attention_cost(config, layer_number, shape, offloaded);
  const Attention attention(config, layer_number, shape);
  const StreamCost& around = attention.around;
  SublayerCost cost;
  cost.saved.residual = around.stream;
  cost.saved.norms = around.pre_norm_saved + around.post_norm_saved;
  cost.saved.attention = attention.saved();
  if (offloaded) cost.offloaded = attention.offloaded();
  const int64_t not_reloaded = cost.offloaded.given.total() - cost.offloaded.taken;
  cost.set_peaks([&](AllocationTrack& track) { attention.forward(track); },
                 [&](AllocationTrack& track) { attention.backward(not_reloaded, track); },
                 attention.unrecorded_peak());
  cost.pending = around.pending() + attention.own_mixed + attention.q;
  // Its saved tensors, gradients of its output, queries, keys, values, and of the stream. Its
  // output is in `pending`, and so are the bytes of linear_qkv's output, unless that output and
  // its gradient exist at the same time.
  cost.deferred_peak = attention.saved() - attention.q -
                       (attention.packed ? 0 : attention.own_mixed) + 2 * attention.q +
                       2 * attention.k + around.stream + attention.backward_extra();
  const int64_t h = config.hidden_size, width = config.num_attention_heads * config.kv_channels,
                keys = config.query_groups() * config.kv_channels;
  const int64_t gates = config.attention_output_gate ? width : 0;
  cost.linears = {{"linear_qkv", width + gates + 2 * keys, h, false, gates},
                  {"linear_proj", h, width}};
  cost.attentions = {attention.attention(layer_number)};
  cost.score_products = attention.score_products();
  cost.moved_elements = attention_moved_elements(config, layer_number);
  if (config.recomputes("core_attn")) cost.recomputed_products = cost.score_products;
  cost.tensor = around.tensor_traffic(shape);
  if (attention.sharing > 1) {
    const double shared = scatter_bytes(attention.sharing, static_cast<double>(attention.mixed));
    cost.tensor += {shared, shared};
  }
  cost.context = attention.context_traffic();
  cost.kept.position = 2 * attention.sizes.groups * attention.sizes.key * shape.element;
  cost.overlaps_context = attention.kernel == AttentionKernel::kRing && attention.a2a == 1;
  return cost;
}

}  // namespace megatron
