#include "megatron/transformer/attention/attention_cost.h"

#include <algorithm>
#include <numeric>

namespace megatron {

namespace {

constexpr int64_t kScoreElements = int64_t{1} << 26;  // tensor/attention/attention_unfused.cc
// SMs of H100 and H200; they bound the splits of the deterministic backward
constexpr int64_t kMultiprocessors = 132;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

enum class Kernel { kLibrary, kUnfused, kRing, kAllGather };

// The attention of one layer on one rank; tensors in bytes.
struct Attention {
  Attention(const TransformerConfig& config, int64_t layer, const LayerShape& shape);

  const TransformerConfig& config;
  const LayerShape& shape;
  const StreamCost around;
  const int64_t sequence, head_size;
  int64_t heads, groups;  // on this rank
  int64_t sharing;        // ranks that share one KV group
  int64_t own_mixed;      // output of linear_qkv
  int64_t mixed;          // ... gathered, if several ranks share a KV group
  int64_t q, k;           // queries; keys, or values
  int64_t head_stats;     // statistics of both norms of --qk-layernorm
  int64_t lse;
  int64_t wide;       // bytes of an fp32 element over those of the model's type
  bool packed;        // attention reads `mixed` directly (packed_attention)
  bool q_in_place;    // queries are a view of `mixed`
  bool new_q, new_k;  // rotated or normed into new tensors
  int64_t a2a = 1;    // ranks of the all-to-all
  int64_t outer = 1;  // ranks of the ring or the gather
  int64_t exchanged = 0;
  int64_t mask = 0;
  int64_t block_scores = 0;  // scores of p2p and all_gather blocks computed without a library
  bool gathers = false;      // all_gather
  Kernel kernel;

  bool copies_q() const { return new_q || !q_in_place; }
  // Saves a log-sum-exp, and apart from the input of linear_proj an output.
  bool saves_library() const {
    return kernel != Kernel::kUnfused && !config.recomputes("core_attn");
  }

  int64_t score_bytes() const;
  int64_t repeated_groups() const;
  int64_t forward_extra() const;
  int64_t backward_copies() const;
  int64_t backward_extra() const;
  int64_t saved() const;

  OffloadedBytes offloaded() const;
  void forward(AllocationTrack& track) const;
  void backward(int64_t not_reloaded, AllocationTrack& track) const;
  int64_t unrecorded_peak() const;
  Traffic ring_traffic(int64_t ranks, double keys) const;
  Traffic context_traffic() const;

 private:
  bool is_unfused(int64_t layer) const;
  void divide_context(int64_t layer);
};

bool Attention::is_unfused(int64_t layer) const {
  if (config.attention_backend == AttentionBackend::kUnfused ||
      config.attention_backend == AttentionBackend::kLocal)
    return true;
  const std::vector<int64_t> window = config.window(layer);
  const bool windowed = !window.empty() && window[0] >= 0 && window[0] < sequence - 1;
  if (shape.documents || config.attention_dropout > 0 || config.attn_logit_softcapping > 0)
    return true;
  if (windowed && (!shape.on_gpu || sequence % 64 != 0)) return true;  // cuDNN supports windows
  return shape.on_gpu && (shape.element != 2 || head_size % 8 != 0 || head_size > 256);
}

// How the context ranks divide the work, and which kernels compute it.
void Attention::divide_context(int64_t layer) {
  const ContextParallelType type =
      shape.context > 1 ? config.context_parallel_type(layer) : ContextParallelType::kA2A;
  a2a = type == ContextParallelType::kA2A      ? shape.context
        : type == ContextParallelType::kA2AP2P ? shape.context_levels.at(0)
                                               : 1;
  outer = shape.context / a2a;
  gathers = type == ContextParallelType::kAllGather;
  const bool unfused = is_unfused(layer);
  kernel = gathers     ? Kernel::kAllGather
           : outer > 1 ? Kernel::kRing
           : unfused   ? Kernel::kUnfused
                       : Kernel::kLibrary;
  if (a2a > 1)
    exchanged = shape.tokens * head_size * (heads + 2 * std::lcm(groups, a2a)) * shape.element;
  const bool whole_sequence = kernel == Kernel::kLibrary || kernel == Kernel::kUnfused;
  if (!whole_sequence && (!shape.on_gpu || unfused)) {
    const int64_t queries = sequence / shape.context * a2a;
    block_scores = shape.samples * heads / a2a * queries * queries * shape.sum;
  }
  if (shape.documents && whole_sequence) mask = shape.samples * sequence * sequence;
}

Attention::Attention(const TransformerConfig& c, int64_t layer, const LayerShape& s)
    : config(c),
      shape(s),
      around(c, s),
      sequence(c.seq_length),
      head_size(c.kv_channels),
      heads(c.num_attention_heads / s.tensor),
      groups(std::max<int64_t>(1, c.query_groups() / s.tensor)),
      sharing(std::max<int64_t>(1, s.tensor / c.query_groups())),
      wide(s.sum / s.element) {
  const int64_t row = s.tokens * head_size * s.element;  // one head of every token
  mixed = row * (heads * sharing + 2 * groups);
  own_mixed = mixed / sharing;
  q = row * heads;
  k = row * groups;
  head_stats = !c.qk_layernorm ? 0
                               : s.tokens * (heads + groups) *
                                     (c.normalization == Normalization::kLayerNorm ? 2 : 1) * s.sum;
  lse = s.tokens * heads * s.sum;
  const int64_t heads_per_group = heads * sharing / groups;
  q_in_place = sharing == 1 && (heads_per_group == 1 || groups == 1);
  packed = !c.qk_layernorm && sharing == 1 && s.context == 1;
  new_q = new_k =
      !packed && (c.qk_layernorm || c.position_embedding_type == PositionEmbedding::kRope);
  divide_context(layer);
  if (packed && kernel == Kernel::kLibrary) q_in_place = true;
}

// fp32 scores of the largest piece that unfused attention computes at a time.
int64_t Attention::score_bytes() const {
  const int64_t b = shape.samples, own_heads = std::max<int64_t>(1, heads / a2a);
  const int64_t own_groups =
      std::min(own_heads, std::max<int64_t>(1, config.query_groups() / shape.tensor / a2a));
  const int64_t group = own_heads / own_groups * sequence * sequence;
  if (b * own_groups * group <= kScoreElements) return b * own_groups * group * shape.sum;
  return std::clamp<int64_t>(kScoreElements / std::max<int64_t>(1, group), 1, own_groups) * group *
         shape.sum;
}

// Keys and values repeated for libtorch's CPU kernel, which has no grouped-query attention; with
// packed attention they are views.
int64_t Attention::repeated_groups() const { return shape.on_gpu || packed || q == k ? 0 : 2 * q; }

// Working memory of one thread in libtorch's tiled CPU kernel: scores and their gradients of one
// tile.
int64_t cpu_piece_bytes(int64_t s, int64_t sum) {
  const int64_t queries = s >= 768 ? 256 : s >= 192 ? 64 : 32, keys = 512;
  return 2 * std::min(s, queries) * std::min(s, keys) * sum;
}

// Temporaries of core attention in the forward, besides inputs and output.
int64_t Attention::forward_extra() const {
  switch (kernel) {
    case Kernel::kLibrary:
      return repeated_groups();
    case Kernel::kUnfused:
      return 2 * score_bytes() + wide * (q + 2 * k) + sequence * sequence;
    case Kernel::kRing:
      return 4 * k + (wide + 1) * q + 2 * lse + block_scores;
    case Kernel::kAllGather:
      return 2 * shape.context * 2 * k + q + block_scores;
  }
  return 0;
}

// What a library's backward allocates on a GPU: the deterministic one of flash attention sums the
// query gradient in fp32, in as many copies as fill the GPU; cuDNN's writes the score gradients of
// a part of the batch.
int64_t Attention::backward_copies() const {
  if (!shape.on_gpu) return 0;
  const int64_t b = shape.samples, own_heads = std::max<int64_t>(1, heads / a2a);
  const int64_t queries = sequence / shape.context * a2a;
  if (kernel != Kernel::kLibrary || queries % 64 != 0)
    return ceil_div(kMultiprocessors, b * own_heads) * b * round_up(queries, 128) * own_heads *
           round_up(head_size, 32) * 4;
  if (config.fast) return q * wide;  // query gradient in fp32
  // Packed attention treats its input as b x groups samples of one KV group each.
  const int64_t own_groups =
      std::max<int64_t>(1, config.query_groups() / shape.tensor / (packed ? 1 : a2a));
  const AttentionParts parts =
      packed ? attention_parts(b * own_groups, own_heads / own_groups, 1, queries, queries, true)
             : attention_parts(b, own_heads, own_groups, queries, queries, true);
  return parts.scratch_bytes;
}

int64_t Attention::backward_extra() const {
  // Gradients of repeated keys and values, before they are summed
  const int64_t expanded = q > k ? 2 * q : 0, copies = backward_copies();
  switch (kernel) {
    case Kernel::kLibrary:
      if (shape.on_gpu) return expanded + copies + lse;
      // The output gradient in the kernel's memory layout; gradients of repeated keys and values
      // instead of the plain ones.
      return q + cpu_piece_bytes(sequence / shape.context * a2a, shape.sum) + repeated_groups() +
             (expanded > 0 ? expanded - 2 * k : 0);
    case Kernel::kUnfused:
      return (config.attention_dropout > 0 ? 5 : 3) * score_bytes() + wide * (2 * q + 2 * k) +
             sequence * sequence;
    case Kernel::kRing:
      return (4 + 4 * wide) * k + wide * q + expanded + copies + lse + 2 * block_scores;
    case Kernel::kAllGather:
      return shape.context * (4 + 2 * wide) * k + expanded + copies + lse + 2 * block_scores;
  }
  return 0;
}

// From the output of linear_qkv to the input of linear_proj.
int64_t Attention::saved() const {
  int64_t saved = mask;
  // Inputs and statistics of the norms of --qk-layernorm
  if (config.qk_layernorm) saved += q + k + head_stats;
  if (exchanged > 0) {
    saved += exchanged;
  } else {
    saved += mixed + (!packed && copies_q() ? q : 0) + (new_k ? k : 0);
  }
  saved += q;  // input of linear_proj
  if (!saves_library()) return saved;
  if (exchanged > 0) saved += q;  // output before the all-to-all back
  return saved + lse;
}

OffloadedBytes Attention::offloaded() const {
  const int64_t e = shape.element, sum = shape.sum,
                norm_stats = config.normalization == Normalization::kLayerNorm ? 2 : 1;
  OffloadedBytes out;
  const auto add = [&](const char* module, int64_t bytes, int64_t element, int64_t count = 1) {
    return offload(config, module, &SavedBytes::attention, bytes, element, count, out);
  };
  offload(config, "attn_norm", &SavedBytes::residual, around.stream, shape.residual, 1, out);
  offload(config, "qkv_linear", &SavedBytes::norms, around.recompute_norm ? 0 : around.normed, e, 1,
          out);
  offload(config, "qkv_linear", &SavedBytes::norms, around.stats, sum, norm_stats, out);
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
  if (config.qk_layernorm) track.take((q_in_place ? q : 0) + k + head_stats + q + k);
  if (!packed && config.position_embedding_type == PositionEmbedding::kRope) track.take(q + k);
  if (exchanged > 0) track.take(2 * exchanged);
  track.take(q + lse);
  track.touch(forward_extra());
  if (exchanged > 0) track.touch(2 * q);
  track.give(track.live() - before);
  track.take(saved());
  around.row_forward(0, track);
}

int64_t Attention::unrecorded_peak() const {
  return mixed + (copies_q() ? q : 0) + (new_k ? k : 0) + exchanged + q +
         std::max(forward_extra(), around.product + around.part);
}

void Attention::backward(int64_t not_reloaded, AllocationTrack& track) const {
  around.row_backward(q, 0, track);
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

Traffic Attention::ring_traffic(int64_t ranks, double keys) const {
  const double others = static_cast<double>(ranks - 1), widened = static_cast<double>(wide);
  Traffic sent{others * keys,
               others * keys + (gathers ? others : static_cast<double>(ranks)) * keys * widened};
  if (config.recomputes("core_attn")) sent.backward += sent.forward;
  return sent;
}

Traffic Attention::context_traffic() const {
  if (shape.context == 1) return {};
  double keys = 2 * static_cast<double>(k);
  Traffic sent;
  if (a2a > 1) {
    // Keys are repeated until their heads are divisible by the inner ranks.
    keys = keys * static_cast<double>(std::lcm(groups, a2a)) / static_cast<double>(groups);
    const double exchange = scatter_bytes(a2a, 2 * static_cast<double>(q) + keys);
    sent = {exchange, exchange};
  }
  if (outer > 1) sent += ring_traffic(outer, keys);
  return sent;
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

PackedHeads attention_heads(const TransformerConfig& c) {
  return {c.query_groups(), c.num_attention_heads / c.query_groups(), c.kv_channels};
}

SublayerCost attention_cost(const TransformerConfig& config, int64_t layer_number,
                            const LayerShape& shape, bool offloaded) {
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
  cost.linears = {{"linear_qkv", width + 2 * keys, h}, {"linear_proj", h, width}};
  // A token sees half of the sequence on average, or all of it; twice, for scores and values.
  cost.score_products = static_cast<double>((config.causal ? 1 : 2) * config.seq_length * width);
  cost.moved_elements = attention_moved_elements(config, layer_number);
  if (config.recomputes("core_attn")) cost.recomputed_products = cost.score_products;
  cost.tensor = around.tensor_traffic(shape);
  if (attention.sharing > 1) {
    const double shared = scatter_bytes(attention.sharing, static_cast<double>(attention.mixed));
    cost.tensor += {shared, shared};
  }
  cost.context = attention.context_traffic();
  cost.overlaps_context = attention.kernel == Kernel::kRing && attention.a2a == 1;
  return cost;
}

}  // namespace megatron
