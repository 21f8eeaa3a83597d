#include "megatron/transformer/attention/multi_latent_attention_cost.h"

#include <algorithm>

#include "megatron/transformer/attention/core_attention_cost.h"

namespace megatron {

namespace {

CoreAttentionSizes latent_sizes(const TransformerConfig& c, const LayerShape& s) {
  CoreAttentionSizes sizes;
  sizes.heads = sizes.groups = c.num_attention_heads / s.tensor;
  sizes.key = c.query_head_size();
  sizes.value = c.v_head_dim;
  return sizes;
}

// An up projection, or linear_q_proj: its input on this rank and on all, and its output.
struct UpProjection {
  int64_t input = 0;     // R w e
  int64_t gathered = 0;  // T w e if rows are gathered over tensor ranks, else 0
  int64_t product = 0;   // T w e: gradient of the input, before it is scattered
  int64_t output = 0;
  int64_t stats = 0, normed = 0;  // of the norm inside; 0 without one
  bool keeps_normed = false;
  bool saves_input = true;  // false: it is the normed input of the sublayer, counted there

  int64_t saved() const { return (saves_input ? input : 0) + stats + (keeps_normed ? normed : 0); }
  // `recorded`: autograd saves what saved() counts.
  void forward(bool recorded, AllocationTrack& track) const {
    track.take(stats + normed);
    track.take(gathered + output);
    track.give(gathered + (recorded && keeps_normed ? 0 : normed) + (recorded ? 0 : stats));
  }
  // From the gradient of its output, which is counted, to that of its input.
  void backward(AllocationTrack& track) const {
    track.take(product);
    if (gathered > 0) track.take(input);
    track.touch(gathered + (keeps_normed ? 0 : normed));
    if (gathered > 0) track.give(product);
    if (normed > 0) track.touch(input);
    track.give(output + saved());
  }
};

// The attention of one layer on one rank; tensors in bytes.
struct LatentAttention : CoreAttentionCost {
  LatentAttention(const TransformerConfig& c, int64_t layer, const LayerShape& s);

  const StreamCost around;
  bool latent_queries;
  int64_t down;        // output of linear_kv_down_proj
  int64_t shared;      // rotated features of the key, of the rows of all ranks
  int64_t own_shared;  // ... of this rank's rows, if it is another tensor
  UpProjection queries, keys;

  int64_t latents() const { return queries.saved() + keys.saved(); }
  bool recomputes_heads() const { return config.recomputes("mla_up_proj"); }
  int64_t heads() const {
    return recomputes_heads() ? shared : exchanged > 0 ? exchanged : q + k + v;
  }
  // Of the norm of the input; its output is converted for each of the two projections.
  int64_t norm_output() const {
    return around.cast > 0 ? 2 * around.normed : around.recompute_norm ? 0 : around.normed;
  }
  int64_t norm_saved() const { return around.pre_norm ? around.stats + norm_output() : 0; }
  int64_t saved() const { return latents() + heads() + CoreAttentionCost::saved(); }

  OffloadedBytes offloaded() const;
  void project_up(bool recorded, AllocationTrack& track) const;
  void forward(AllocationTrack& track) const;
  void backward(int64_t not_reloaded, AllocationTrack& track) const;
  int64_t unrecorded_peak() const;
  int64_t pending() const;
  Traffic tensor_traffic() const;
  double up_products() const;      // of the up projections, per token over all ranks
  double gathered_inputs() const;  // bytes that their forward sends

 private:
  UpProjection up_projection(int64_t width, int64_t output, bool normed) const;
};

UpProjection LatentAttention::up_projection(int64_t width, int64_t output, bool normed) const {
  UpProjection up;
  up.input = shape.rows * width * shape.element;
  up.product = shape.tokens * width * shape.element;
  up.gathered = shape.sequence_parallel ? up.product : 0;
  up.output = output;
  if (!normed) return up;
  up.normed = up.input;
  up.stats = around.stats;
  up.keeps_normed = !config.recomputes("layernorm");
  return up;
}

LatentAttention::LatentAttention(const TransformerConfig& c, int64_t layer, const LayerShape& s)
    : CoreAttentionCost(c, layer, s, latent_sizes(c, s)),
      around(c, s),
      latent_queries(c.q_lora_rank.has_value()),
      down(s.rows * (c.kv_lora_rank + c.qk_pos_emb_head_dim) * s.element),
      shared(s.tokens * c.qk_pos_emb_head_dim * s.element),
      own_shared(s.sequence_parallel ? s.rows * c.qk_pos_emb_head_dim * s.element : 0),
      queries(latent_queries ? up_projection(*c.q_lora_rank, q, c.qk_layernorm)
                             : up_projection(c.hidden_size, q, false)),
      keys(up_projection(c.kv_lora_rank,
                         s.tokens * sizes.heads * (c.qk_head_dim + c.v_head_dim) * s.element,
                         c.qk_layernorm)) {
  queries.saves_input = latent_queries;
}

OffloadedBytes LatentAttention::offloaded() const {
  const int64_t e = shape.element, sum = shape.sum,
                norm_stats = config.normalization == Normalization::kLayerNorm ? 2 : 1;
  OffloadedBytes bytes;
  const auto add = [&](const char* module, int64_t SavedBytes::* kind, int64_t size,
                       int64_t element, int64_t count = 1) {
    offload(config, module, kind, size, element, count, bytes);
  };
  add("attn_norm", &SavedBytes::residual, around.stream, shape.residual);
  if (around.pre_norm) {
    add("qkv_linear", &SavedBytes::norms, norm_output(), e, around.cast > 0 ? 2 : 1);
    add("qkv_linear", &SavedBytes::norms, around.stats, sum, norm_stats);
  }
  for (const UpProjection* up : {&queries, &keys}) {
    if (up->saves_input) add("qkv_linear", &SavedBytes::attention, up->input, e);
    if (up->keeps_normed) add("qkv_linear", &SavedBytes::attention, up->normed, e);
    add("qkv_linear", &SavedBytes::attention, up->stats, sum, norm_stats);
  }
  if (exchanged > 0) {
    add("core_attn", &SavedBytes::attention, exchanged, e, 3);
    if (saves_library()) add("core_attn", &SavedBytes::attention, padded_out() > 0 ? q : out, e);
    if (saves_library()) add("core_attn", &SavedBytes::attention, lse, sum);
  } else {
    for (const int64_t size : {q, k, v})
      if (!recomputes_heads()) add("core_attn", &SavedBytes::attention, size, e);
    if (saves_library()) add("attn_proj", &SavedBytes::attention, padded_out(), e);
    if (saves_library()) add("attn_proj", &SavedBytes::attention, lse, sum);
  }
  add("attn_proj", &SavedBytes::attention, out, e);
  return bytes;
}

// Queries, keys and values from the latents; they stay allocated.
void LatentAttention::project_up(bool recorded, AllocationTrack& track) const {
  queries.forward(recorded, track);
  keys.forward(recorded, track);
  track.take(q + k + v);
  track.touch(shared);
  track.give(queries.output + keys.output);
}

void LatentAttention::forward(AllocationTrack& track) const {
  const int64_t before = track.live(), normed = around.cast > 0 ? 2 * around.normed : around.normed;
  if (around.pre_norm) track.take(around.stats + around.cast + normed);
  if (latent_queries) track.take(queries.input);
  track.take(down + keys.input + own_shared + shared);
  track.give(down + own_shared);
  if (latent_queries && !around.recompute_norm) track.give(around.cast);
  project_up(/*recorded=*/true, track);
  if (exchanged > 0) track.take(2 * exchanged);
  track.take(out + lse);
  track.touch(forward_extra());
  if (exchanged > 0) track.touch(2 * out);
  track.give(track.live() - before);
  track.take(norm_saved() + saved());
  around.row_forward(0, track);
}

int64_t LatentAttention::unrecorded_peak() const {
  const int64_t inputs = (latent_queries ? queries.input : around.normed) + keys.input + shared;
  return std::max({around.normed + around.cast + inputs + down,
                   inputs + queries.output + keys.output + q + k + v + shared,
                   inputs + q + k + v + exchanged + out + forward_extra(),
                   out + around.product + around.part});
}

void LatentAttention::backward(int64_t not_reloaded, AllocationTrack& track) const {
  // Where core attention saves its output too, that is freed with the rest of what it saves.
  const bool shared_out = saves_library() && padded_out() == 0 && exchanged == 0;
  around.row_backward(out, shared_out ? 0 : out, track);
  if (recomputes_heads()) project_up(/*recorded=*/false, track);
  if (exchanged > 0) track.touch(2 * out);
  track.take(q + k + v);
  track.touch(backward_extra());
  if (exchanged > 0) track.touch(2 * exchanged);
  if (recomputes_heads()) track.give(q + k + v);
  track.give(heads() + CoreAttentionCost::saved() + (shared_out ? out : 0) - not_reloaded);
  track.take(queries.output + keys.output + shared);
  track.touch(shared * sizes.heads);
  track.give(q + k + v);
  keys.backward(track);
  queries.backward(track);
  if (own_shared > 0) track.take(own_shared);
  if (own_shared > 0) track.give(shared);
  track.take(down);
  track.give((own_shared > 0 ? own_shared : shared) + keys.input);
  // Gradients of both projections of the normed input; without a latent of queries theirs came
  // first.
  const int64_t normed = around.cast > 0 ? around.stream : around.normed;
  track.touch(around.recompute_norm ? normed : 0);
  track.take(normed);
  track.give(down);
  if (latent_queries) {
    track.take(normed);
    track.give(queries.input);
  }
  track.give(normed);
  if (around.pre_norm) {
    track.take(around.stream);
    track.give(normed + norm_saved());
  }
  track.touch(around.stream);  // the sum with the gradient of the residual path
  track.give(around.stream);
}

// Inputs and output gradients of the linears.
int64_t LatentAttention::pending() const {
  const int64_t normed = around.cast > 0 ? 2 * around.normed : around.normed;
  return normed + latents() + queries.output + keys.output + down +
         (latent_queries ? queries.input : 0) + out + around.product;
}

Traffic LatentAttention::tensor_traffic() const {
  const bool rows = shape.sequence_parallel;
  const auto one_way = [&](int64_t bytes) {
    return scatter_bytes(shape.tensor, static_cast<double>(bytes));
  };
  const double columns = one_way(queries.product + keys.product), row = one_way(around.product),
               key = one_way(shared);
  if (!rows) return {2 * row, 2 * columns + 2 * key};
  return {row + columns + key, row + 2 * columns + key};
}

double LatentAttention::up_products() const {
  const int64_t width = config.q_lora_rank.value_or(config.hidden_size),
                rows = config.qk_head_dim + config.v_head_dim;
  return static_cast<double>(config.num_attention_heads *
                             (config.query_head_size() * width + rows * config.kv_lora_rank));
}

double LatentAttention::gathered_inputs() const {
  return scatter_bytes(shape.tensor, static_cast<double>(queries.gathered + keys.gathered));
}

// Per token, forward and backward.
double latent_moved_elements(const TransformerConfig& c) {
  const auto h = static_cast<double>(c.hidden_size), n = static_cast<double>(c.num_attention_heads),
             key = static_cast<double>(c.query_head_size()),
             plain = static_cast<double>(c.qk_head_dim), value = static_cast<double>(c.v_head_dim);
  double elements = kNormElements * h;
  if (c.qk_layernorm)
    elements += kNormElements * static_cast<double>(c.q_lora_rank.value_or(0) + c.kv_lora_rank);
  // Queries, keys and values are written apart: read and write, forward and backward.
  elements += 2 * n * (2 * key + (plain + key) + 2 * value);
  return elements + (c.add_bias_linear ? h : 0);
}

// Megatron-LM counts the norm of a latent as one output more of its up projection.
std::vector<LinearSize> latent_linears(const TransformerConfig& c) {
  const int64_t h = c.hidden_size, n = c.num_attention_heads, width = n * c.query_head_size();
  std::vector<LinearSize> linears;
  if (c.q_lora_rank) {
    linears.push_back({"linear_q_down_proj", *c.q_lora_rank, h});
    linears.push_back({"linear_q_up_proj", width, *c.q_lora_rank, false, -1});
  } else {
    linears.push_back({"linear_q_proj", width, h});
  }
  linears.push_back({"linear_kv_down_proj", c.kv_lora_rank + c.qk_pos_emb_head_dim, h});
  linears.push_back(
      {"linear_kv_up_proj", n * (c.qk_head_dim + c.v_head_dim), c.kv_lora_rank, false, -1});
  linears.push_back({"linear_proj", h, c.attention_width()});
  return linears;
}

}  // namespace

SublayerCost multi_latent_attention_cost(const TransformerConfig& config, int64_t layer_number,
                                         const LayerShape& shape, bool offloaded) {
  const LatentAttention attention(config, layer_number, shape);
  const StreamCost& around = attention.around;
  SublayerCost cost;
  cost.saved.residual = around.stream;
  cost.saved.norms = attention.norm_saved() + around.post_norm_saved;
  cost.saved.attention = attention.saved();
  if (offloaded) cost.offloaded = attention.offloaded();
  const int64_t not_reloaded = cost.offloaded.given.total() - cost.offloaded.taken;
  cost.set_peaks([&](AllocationTrack& track) { attention.forward(track); },
                 [&](AllocationTrack& track) { attention.backward(not_reloaded, track); },
                 attention.unrecorded_peak());
  cost.pending = attention.pending();
  // What core attention saves, gradients of its output and inputs, and of the stream.
  cost.deferred_peak = attention.heads() + attention.CoreAttentionCost::saved() - attention.out +
                       attention.out + attention.q + attention.k + attention.v + around.stream +
                       attention.backward_extra();
  cost.linears = latent_linears(config);
  cost.attentions = {attention.attention(layer_number)};
  cost.score_products = attention.score_products();
  cost.kept.position = (config.kv_lora_rank + config.qk_pos_emb_head_dim) * shape.element;
  cost.moved_elements = latent_moved_elements(config);
  if (config.recomputes("core_attn")) cost.recomputed_products = cost.score_products;
  cost.tensor = attention.tensor_traffic();
  if (attention.recomputes_heads()) {
    cost.recomputed_products += attention.up_products();
    cost.tensor.backward += attention.gathered_inputs();
  }
  cost.context = attention.context_traffic();
  cost.overlaps_context = attention.kernel == AttentionKernel::kRing && attention.a2a == 1;
  return cost;
}

}  // namespace megatron
