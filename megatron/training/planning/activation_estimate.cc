#include "megatron/training/planning/activation_estimate.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/tensor_parallel/linear_cross_entropy.h"
#include "megatron/transformer/feed_forward/mlp.h"

namespace megatron {

namespace {

constexpr int64_t kIdBytes = 8;                       // size of a token id or a target
constexpr int64_t kScoreElements = int64_t{1} << 26;  // tensor/attention/attention_unfused.cc
// SMs of H100 and H200; they bound the splits of the deterministic backward
constexpr int64_t kMultiprocessors = 132;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

// Simulates allocations and frees; keeps the live bytes and their peak.
class Track {
 public:
  void take(int64_t bytes) { most_ = std::max(most_, live_ += bytes); }
  void give(int64_t bytes) { live_ -= bytes; }
  // Allocates and frees at once: a temporary of one operation.
  void touch(int64_t bytes) { most_ = std::max(most_, live_ + bytes); }
  int64_t live() const { return live_; }
  int64_t most() const { return most_; }

 private:
  int64_t live_ = 0, most_ = 0;
};

enum class AttentionKind { kLibrary, kUnfused, kRing, kAllGather };

// The tensors of one layer on one rank, in bytes.
struct LayerSizes {
  int64_t stream;    // R h x
  int64_t normed;    // R h e
  int64_t cast;      // R h x if the norm's output is converted, else 0
  int64_t gathered;  // T h e if rows are gathered over tensor ranks, else 0
  // T h e: outputs of linear_proj and linear_fc2, input gradients of linear_qkv and linear_fc1
  int64_t product;
  int64_t part;        // R h e: `product` after the reduce-scatter; 0: none
  int64_t stats;       // statistics of one norm
  int64_t own_mixed;   // output of linear_qkv
  int64_t mixed;       // ... gathered, if several ranks share a KV group
  int64_t q, k;        // queries; keys, or values
  int64_t head_stats;  // statistics of both norms of --qk-layernorm
  int64_t lse;
  int64_t fc1, act;
  bool packed;        // attention reads `mixed` directly (packed_attention)
  bool q_in_place;    // queries are a view of `mixed`
  bool new_q, new_k;  // rotated or normed into new tensors
  int64_t a2a = 1;    // ranks of the all-to-all
  int64_t exchanged = 0;
  int64_t mask = 0;
  int64_t block_scores = 0;  // scores of p2p and all_gather blocks computed without a library
  AttentionKind kind;
};

bool attends_unfused(const LayoutPlan& plan, int64_t layer, bool documents) {
  const TransformerConfig& c = plan.model();
  if (c.attention_backend == AttentionBackend::kUnfused ||
      c.attention_backend == AttentionBackend::kLocal)
    return true;
  const std::vector<int64_t> window = c.window(layer);
  const bool windowed = !window.empty() && window[0] >= 0 && window[0] < c.seq_length - 1;
  if (documents || c.attention_dropout > 0 || c.attn_logit_softcapping > 0) return true;
  if (windowed && (!plan.on_gpu || c.seq_length % 64 != 0)) return true;  // cuDNN supports windows
  return plan.on_gpu && (plan.bytes.model != 2 || c.kv_channels % 8 != 0 || c.kv_channels > 256);
}

LayerSizes layer_sizes(const LayoutPlan& plan, int64_t layer) {
  const TransformerConfig& c = plan.model();
  const int64_t t = plan.tensor, T = plan.tokens(), R = plan.rows(), h = c.hidden_size,
                d = c.kv_channels, e = plan.bytes.model;
  const int64_t per_row = c.normalization == Normalization::kLayerNorm ? 2 : 1,
                sum = plan.bytes.sum;
  const int64_t heads = c.num_attention_heads / t,
                groups = std::max<int64_t>(1, c.query_groups() / t);
  // Ranks that share one KV group
  const int64_t sharing = std::max<int64_t>(1, t / c.query_groups());
  const int64_t heads_per_group = heads * sharing / groups;
  LayerSizes z{};
  z.stream = R * h * plan.bytes.residual;
  z.normed = R * h * e;
  z.cast = plan.bytes.residual == e ? 0 : z.stream;
  z.gathered = plan.sequence_parallel ? T * h * e : 0;
  z.product = T * h * e;
  z.part = plan.sequence_parallel ? z.normed : 0;
  z.stats = R * per_row * sum;
  z.mixed = T * d * (heads * sharing + 2 * groups) * e;
  z.own_mixed = z.mixed / sharing;
  z.q = T * heads * d * e;
  z.k = T * groups * d * e;
  z.head_stats = c.qk_layernorm ? T * (heads + groups) * per_row * sum : 0;
  z.lse = T * heads * sum;
  z.fc1 = T * c.ffn_hidden_size / t * (is_gated(c.activation()) ? 2 : 1) * e;
  z.act = T * c.ffn_hidden_size / t * e;
  z.q_in_place = sharing == 1 && (heads_per_group == 1 || groups == 1);
  z.packed = !c.qk_layernorm && sharing == 1 && plan.context == 1;
  z.new_q = z.new_k =
      !z.packed && (c.qk_layernorm || c.position_embedding_type == PositionEmbedding::kRope);

  const DataConfig& data = plan.arguments.data;
  const bool documents = data.reset_attention_mask || data.dataloader_inter_document_masking;
  const ContextParallelType type =
      plan.context > 1 ? c.context_parallel_type(layer) : ContextParallelType::kA2A;
  const std::vector<int64_t>& levels = plan.arguments.parallel.hierarchical_context_parallel_sizes;
  const int64_t inner = type == ContextParallelType::kA2A      ? plan.context
                        : type == ContextParallelType::kA2AP2P ? levels.at(0)
                                                               : 1;
  z.kind = type == ContextParallelType::kAllGather   ? AttentionKind::kAllGather
           : inner < plan.context                    ? AttentionKind::kRing
           : attends_unfused(plan, layer, documents) ? AttentionKind::kUnfused
                                                     : AttentionKind::kLibrary;
  if (inner > 1) {
    z.a2a = inner;
    z.exchanged = T * d * (heads + 2 * std::lcm(groups, inner)) * e;
  }
  const bool whole_sequence =
      z.kind == AttentionKind::kLibrary || z.kind == AttentionKind::kUnfused;
  if (!whole_sequence && (!plan.on_gpu || attends_unfused(plan, layer, documents))) {
    const int64_t queries = c.seq_length / plan.context * z.a2a;
    z.block_scores =
        plan.arguments.training.micro_batch_size * heads / z.a2a * queries * queries * sum;
  }
  if (z.packed && z.kind == AttentionKind::kLibrary) z.q_in_place = true;
  if (documents && whole_sequence)
    z.mask = plan.arguments.training.micro_batch_size * c.seq_length * c.seq_length;
  return z;
}

// fp32 scores of the largest piece that unfused attention computes at a time.
int64_t score_bytes(const LayoutPlan& plan, const LayerSizes& z, int64_t queries, int64_t keys) {
  const TransformerConfig& c = plan.model();
  const int64_t b = plan.arguments.training.micro_batch_size,
                heads = std::max<int64_t>(1, c.num_attention_heads / plan.tensor / z.a2a);
  const int64_t groups =
      std::min(heads, std::max<int64_t>(1, c.query_groups() / plan.tensor / z.a2a));
  const int64_t group = heads / groups * queries * keys;
  if (b * groups * group <= kScoreElements) return b * groups * group * plan.bytes.sum;
  return std::clamp<int64_t>(kScoreElements / std::max<int64_t>(1, group), 1, groups) * group *
         plan.bytes.sum;
}

// Keys and values repeated for libtorch's CPU kernel, which has no grouped-query attention; with
// packed attention they are views.
int64_t repeated_groups(const LayoutPlan& plan, const LayerSizes& z) {
  return plan.on_gpu || z.packed || z.q == z.k ? 0 : 2 * z.q;
}

// Working memory of one thread in libtorch's tiled CPU kernel: scores and their gradients of one
// tile.
int64_t cpu_piece_bytes(const LayoutPlan& plan, int64_t s) {
  const int64_t queries = s >= 768 ? 256 : s >= 192 ? 64 : 32, keys = 512;
  return 2 * std::min(s, queries) * std::min(s, keys) * plan.bytes.sum;
}

// Temporaries of core attention in the forward, besides inputs and output.
int64_t attention_forward_extra(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t s = plan.model().seq_length, wide = plan.bytes.sum / plan.bytes.model;
  switch (z.kind) {
    case AttentionKind::kLibrary:
      return repeated_groups(plan, z);
    case AttentionKind::kUnfused:
      return 2 * score_bytes(plan, z, s, s) + wide * (z.q + 2 * z.k) + s * s;
    case AttentionKind::kRing:
      return 4 * z.k + (wide + 1) * z.q + 2 * z.lse + z.block_scores;
    case AttentionKind::kAllGather:
      return 2 * plan.context * 2 * z.k + z.q + z.block_scores;
  }
  return 0;
}

int64_t attention_backward_extra(const LayoutPlan& plan, const LayerSizes& z) {
  const TransformerConfig& c = plan.model();
  const int64_t s = c.seq_length, b = plan.arguments.training.micro_batch_size,
                wide = plan.bytes.sum / plan.bytes.model;
  const int64_t heads = std::max<int64_t>(1, c.num_attention_heads / plan.tensor / z.a2a);
  // Gradients of repeated keys and values, before they are summed
  const int64_t expanded = z.q > z.k ? 2 * z.q : 0;
  // The deterministic backward of flash attention accumulates the query gradient in fp32, in as
  // many copies as fill the GPU; cuDNN's writes the score gradients of a part of the batch.
  const int64_t splits = ceil_div(kMultiprocessors, b * heads), queries = s / plan.context * z.a2a;
  const bool fused = z.kind == AttentionKind::kLibrary && queries % 64 == 0;
  // Packed attention treats its input as b x groups samples of one KV group each.
  const int64_t groups =
      std::max<int64_t>(1, c.query_groups() / plan.tensor / (z.packed ? 1 : z.a2a));
  const AttentionParts parts =
      z.packed ? attention_parts(b * groups, heads / groups, 1, queries, queries, !c.fast)
               : attention_parts(b, heads, groups, queries, queries, !c.fast);
  const int64_t copies =
      !plan.on_gpu      ? 0
      : fused && c.fast ? z.q * wide  // query gradient in fp32
      : fused           ? parts.scratch_bytes
              : splits * b * round_up(queries, 128) * heads * round_up(c.kv_channels, 32) * 4;
  switch (z.kind) {
    case AttentionKind::kLibrary:
      if (plan.on_gpu) return expanded + copies + z.lse;
      // The output gradient in the kernel's memory layout; gradients of repeated keys and values
      // instead of the plain ones.
      return z.q + cpu_piece_bytes(plan, queries) + repeated_groups(plan, z) +
             (expanded > 0 ? expanded - 2 * z.k : 0);
    case AttentionKind::kUnfused:
      return (c.attention_dropout > 0 ? 5 : 3) * score_bytes(plan, z, s, s) +
             wide * (2 * z.q + 2 * z.k) + s * s;
    case AttentionKind::kRing:
      return (4 + 4 * wide) * z.k + wide * z.q + expanded + copies + z.lse + 2 * z.block_scores;
    case AttentionKind::kAllGather:
      return plan.context * (4 + 2 * wide) * z.k + expanded + copies + z.lse + 2 * z.block_scores;
  }
  return 0;
}

// Bytes that attention saves, from the output of linear_qkv to its own output.
int64_t attention_saved(const LayoutPlan& plan, const LayerSizes& z) {
  const TransformerConfig& c = plan.model();
  int64_t saved = z.mask;
  // Inputs and statistics of the norms of --qk-layernorm
  if (c.qk_layernorm) saved += z.q + z.k + z.head_stats;
  if (z.exchanged > 0) {
    saved += z.exchanged;
  } else {
    saved += z.mixed + (!z.packed && (z.new_q || !z.q_in_place) ? z.q : 0) + (z.new_k ? z.k : 0);
  }
  saved += z.q;  // input of linear_proj
  if (z.kind == AttentionKind::kUnfused || c.recomputes("core_attn")) return saved;
  if (z.exchanged > 0) saved += z.q;  // output before the all-to-all back
  return saved + z.lse;
}

// Saved bytes of the activation's output, the input of linear_fc2.
int64_t saved_activation(const TransformerConfig& c, const LayerSizes& z) {
  return c.recomputes("mlp_act") ? 0 : z.act;
}

// Approximation: all layers are like the first one.
bool gelu_in_product(const LayoutPlan& plan) { return is_gelu_in_product(plan.model(), 1); }

// Bytes that the norm of a sublayer's output saves: its input and its statistics; 0 without one.
int64_t post_norm_saved(const LayoutPlan& plan, const LayerSizes& z) {
  return plan.model().has_post_norm() ? (z.part > 0 ? z.part : z.product) + z.stats : 0;
}

SavedBytes saved_by_layer(const LayoutPlan& plan, const LayerSizes& z) {
  SavedBytes saved;
  saved.residual = 2 * z.stream;
  const TransformerConfig& c = plan.model();
  if (c.has_pre_norm()) {
    saved.norms =
        (c.recomputes("mlp") ? 1 : 2) * (z.stats + (c.recomputes("layernorm") ? 0 : z.normed));
  }
  saved.norms += (c.recomputes("mlp") ? 1 : 2) * post_norm_saved(plan, z);
  saved.attention = attention_saved(plan, z);
  if (!c.recomputes("mlp")) saved.mlp = z.fc1 + saved_activation(c, z);
  return saved;
}

// Offloaded bytes of a layer, by half layer: freed on the device (`given`), and allocated again
// when reloaded (`taken`).
struct OffloadedBytes {
  SavedBytes given;
  int64_t given_by_half[2] = {0, 0};
  int64_t taken_by_half[2] = {0, 0};
};

OffloadedBytes offloaded_by_layer(const LayoutPlan& plan, const LayerSizes& z) {
  const TransformerConfig& c = plan.model();
  const int64_t e = plan.bytes.model, sum = plan.bytes.sum;
  OffloadedBytes o;
  // `count` tensors of equal size, of which `taken` bytes are reloaded.
  const auto add = [&](const char* module, int half, int64_t SavedBytes::* kind, int64_t bytes,
                       int64_t element, int64_t count = 1) {
    if (bytes == 0 || !c.offloads(module) || bytes / count / element < c.min_offloaded_tensor_size)
      return false;
    o.given.*kind += bytes;
    o.given_by_half[half] += bytes;
    o.taken_by_half[half] += bytes;
    return true;
  };
  const int64_t normed = c.recomputes("layernorm") ? 0 : z.normed,
                norm_stats = c.normalization == Normalization::kLayerNorm ? 2 : 1;
  add("attn_norm", 0, &SavedBytes::residual, z.stream, plan.bytes.residual);
  add("qkv_linear", 0, &SavedBytes::norms, normed, e);
  add("qkv_linear", 0, &SavedBytes::norms, z.stats, sum, norm_stats);
  if (c.qk_layernorm) {
    add("core_attn", 0, &SavedBytes::attention, z.q, e);
    add("core_attn", 0, &SavedBytes::attention, z.k, e);
    // Statistics are per head: tensors of T heads and of T groups, each norm_stats times.
    const int64_t of_keys = z.head_stats * z.k / (z.q + z.k);
    add("core_attn", 0, &SavedBytes::attention, z.head_stats - of_keys, sum, norm_stats);
    add("core_attn", 0, &SavedBytes::attention, of_keys, sum, norm_stats);
  }
  const bool library = z.kind != AttentionKind::kUnfused && !c.recomputes("core_attn");
  if (z.exchanged > 0) {
    add("core_attn", 0, &SavedBytes::attention, z.exchanged, e, 3);
    if (library) add("core_attn", 0, &SavedBytes::attention, z.q, e);
    if (library) add("core_attn", 0, &SavedBytes::attention, z.lse, sum);
  } else {
    if (!z.packed && (z.new_q || !z.q_in_place))
      add("core_attn", 0, &SavedBytes::attention, z.q, e);
    if (z.new_k) add("core_attn", 0, &SavedBytes::attention, z.k, e);
    // Only the part of linear_qkv's output that attention reads is reloaded.
    if (z.packed) {
      add("core_attn", 0, &SavedBytes::attention, z.mixed, e);
    } else if (add("core_attn", 0, &SavedBytes::attention, z.mixed, e,
                   std::max<int64_t>(1, z.mixed / z.k))) {
      o.taken_by_half[0] +=
          z.k + (z.new_k ? 0 : z.k) + (z.new_q || !z.q_in_place ? 0 : z.q) - z.mixed;
    }
    if (library) add("attn_proj", 0, &SavedBytes::attention, z.lse, sum);
  }
  add("attn_proj", 0, &SavedBytes::attention, z.q, e);
  add("mlp_norm", 1, &SavedBytes::residual, z.stream, plan.bytes.residual);
  if (c.recomputes("mlp")) return o;
  add("mlp_fc1", 1, &SavedBytes::norms, normed, e);
  add("mlp_fc1", 1, &SavedBytes::norms, z.stats, sum, norm_stats);
  add("mlp_act", 1, &SavedBytes::mlp, z.fc1, e);
  add("mlp_fc2", 1, &SavedBytes::mlp, saved_activation(c, z), e);
  return o;
}

// Norm, all-gather and GEMM of a column-parallel layer; the output, `product` bytes, stays
// allocated.
void norm_and_multiply(const LayoutPlan& plan, const LayerSizes& z, int64_t product, Track& track) {
  const bool norm = plan.model().has_pre_norm();
  if (norm) track.take(z.stats + z.normed + z.cast);
  track.take(z.gathered + product);
  track.give(z.gathered + (norm ? z.cast : 0));
  if (norm && plan.model().recomputes("layernorm")) track.give(z.normed);
}

// GEMM of a row-parallel layer, reduction over tensor ranks, and residual add, whose result stays
// allocated. `unsaved`: temporaries made from the layer's input.
void multiply_and_add(const LayoutPlan& plan, const LayerSizes& z, int64_t unsaved, Track& track) {
  track.take(unsaved + z.product + z.part);
  track.give(unsaved);
  if (z.part > 0) track.give(z.product);
  const int64_t branch = z.part > 0 ? z.part : z.product;
  track.take(post_norm_saved(plan, z));
  track.take(z.stream);
  track.give(branch);
}

// Forward of the MLP half under autograd: ends with its saved tensors and its output allocated.
void feed_forward(const LayoutPlan& plan, const LayerSizes& z, Track& track) {
  const int64_t saved = saved_activation(plan.model(), z);
  norm_and_multiply(plan, z, z.fc1, track);
  track.take(saved);
  multiply_and_add(plan, z, z.act - saved, track);
}

// Peak of the MLP half without autograd, in addition to its input and its output.
int64_t unrecorded_feed_forward(const LayerSizes& z) {
  return std::max(z.fc1 + std::max(z.normed + z.cast + z.gathered, z.act),
                  z.act + z.product + z.part);
}

// Forward of a layer whose input is already counted. Ends with its saved tensors (without its
// input) and its output allocated. `leaving`: bytes of other layers still in transfer to the host
// while the attention half / the MLP half runs.
Track layer_forward(const LayoutPlan& plan, const LayerSizes& z,
                    std::pair<int64_t, int64_t> leaving = {0, 0}) {
  Track track;
  track.take(leaving.first);
  norm_and_multiply(plan, z, z.own_mixed, track);
  if (z.mixed != z.own_mixed) {
    track.take(2 * z.mixed);  // all-gathered, then reordered
    track.give(z.mixed + z.own_mixed);
  }
  const int64_t before = track.live() - z.mixed;
  if (!z.q_in_place) track.take(z.q);
  if (plan.model().qk_layernorm)
    track.take((z.q_in_place ? z.q : 0) + z.k + z.head_stats + z.q + z.k);
  if (!z.packed && plan.model().position_embedding_type == PositionEmbedding::kRope)
    track.take(z.q + z.k);
  if (z.exchanged > 0) track.take(2 * z.exchanged);
  track.take(z.q + z.lse);
  track.touch(attention_forward_extra(plan, z));
  if (z.exchanged > 0) track.touch(2 * z.q);
  track.give(track.live() - before);
  track.take(attention_saved(plan, z));
  multiply_and_add(plan, z, 0, track);
  track.give(leaving.first);
  track.take(leaving.second);
  if (plan.model().recomputes("mlp")) {
    track.touch(unrecorded_feed_forward(z));
    track.take(z.stream);
  } else {
    feed_forward(plan, z, track);
  }
  return track;
}

// Peak of a layer without autograd, in addition to its input and its output.
int64_t unrecorded_forward(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t attention = z.mixed + (z.new_q || !z.q_in_place ? z.q : 0) + (z.new_k ? z.k : 0) +
                            z.exchanged + z.q +
                            std::max(attention_forward_extra(plan, z), z.product + z.part);
  return std::max(attention, z.stream + unrecorded_feed_forward(z));
}

// Backward of norm and GEMM of a column-parallel layer, from dy, which is already counted. Ends
// with the gradient of the residual stream allocated, and dy and the saved tensors freed.
void column_backward(const LayoutPlan& plan, const LayerSizes& z, int64_t dy, Track& track) {
  const bool recompute = plan.model().recomputes("layernorm");
  track.take(z.product);
  track.take(z.part);
  track.touch(z.gathered + (recompute ? z.normed + z.cast : 0));
  if (z.part > 0) track.give(z.product);
  track.take(z.stream + z.cast);
  const int64_t normed = plan.model().has_pre_norm() ? z.stats + (recompute ? 0 : z.normed) : 0;
  track.give(dy + z.cast + (z.part > 0 ? z.part : z.product) + normed);
  // The norm's backward adds the gradient of the residual path; without a norm the sum is another
  // tensor.
  if (!plan.model().has_pre_norm()) track.touch(z.stream);
  track.give(z.stream);
}

struct LayerBackward {
  int64_t first_half;  // peak in its MLP half, whose backward runs first
  int64_t most;
};

// Backward of a layer: peak in addition to its saved tensors and its output gradient.
// `grad_is_held`: the caller keeps the output gradient alive. `not_reloaded`: saved attention bytes
// that stay offloaded. `reloading`: bytes being reloaded for other layers while the MLP half / the
// attention half runs backward.
LayerBackward layer_backward(const LayoutPlan& plan, const LayerSizes& z, bool grad_is_held,
                             int64_t not_reloaded = 0,
                             std::pair<int64_t, int64_t> reloading = {0, 0}) {
  const TransformerConfig& c = plan.model();
  Track track;
  // Gradient of a sublayer's output, if it is not the stream's gradient itself.
  const int64_t branch = c.hidden_dropout > 0 || z.cast > 0 ? z.normed : 0;
  const auto row_backward = [&](int64_t input, int64_t input_saved) {
    track.give(post_norm_saved(plan, z));
    track.take(branch);
    track.take(z.gathered + input);
    track.give(z.gathered + branch + input_saved);
  };
  track.take(reloading.first - not_reloaded);
  if (c.recomputes("mlp")) {
    feed_forward(plan, z, track);
    track.give(z.stream);  // the recomputed output; its gradient is already counted
  }
  const int64_t activation = saved_activation(c, z);
  row_backward(z.act, activation);
  track.touch(z.act - activation);  // recomputed activation
  if (!gelu_in_product(plan)) {
    track.take(z.fc1);
    track.give(z.act);  // gradient of the activation's output
  }
  track.give(z.fc1);  // the saved output of linear_fc1
  column_backward(plan, z, z.fc1, track);
  if (grad_is_held) track.take(z.stream);
  track.give(z.stream);  // saved stream after attention
  track.give(reloading.first);
  track.take(reloading.second);
  const int64_t first_half = track.most();
  const int64_t attention = attention_saved(plan, z) - not_reloaded;
  row_backward(z.q, 0);
  if (z.exchanged > 0) track.touch(2 * z.q);
  // Its gradient; queries gathered into one tensor
  if (z.packed) track.take(z.mixed + (z.q_in_place ? 0 : z.q));
  if (!z.packed || !plan.on_gpu) track.take(z.q + 2 * z.k);
  track.touch(attention_backward_extra(plan, z));
  if (z.exchanged > 0) track.touch(2 * z.exchanged);
  if (z.new_q) track.touch(z.q + z.k);
  if (!z.packed) track.take(z.mixed);
  if (z.packed && !z.q_in_place) track.give(z.q);
  // Never allocated; balances the next line
  if (z.packed && plan.on_gpu) track.take(z.q + 2 * z.k);
  track.give(z.q + z.q + 2 * z.k + attention);
  if (z.mixed != z.own_mixed) {
    track.touch(z.mixed + z.own_mixed);
    track.give(z.mixed - z.own_mixed);
  }
  column_backward(plan, z, z.own_mixed, track);
  return {first_half, track.most()};
}

// Bytes that a layer holds for weight gradients that run as an action W of their own: inputs and
// output gradients of its GEMMs.
int64_t layer_pending(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t normed = plan.model().recomputes("layernorm") ? 0 : z.normed;
  return 2 * (z.stream + z.stats + normed) + z.own_mixed + z.q + z.fc1 + z.act + 2 * z.product;
}

// Peak in addition to that, in the backward of attention: its saved tensors, gradients of its
// output, queries, keys, values, and of the stream.
int64_t deferred_extra(const LayoutPlan& plan, const LayerSizes& z) {
  // Attention's output is in layer_pending, and so are the bytes of linear_qkv's output, unless
  // that output and its gradient exist at the same time.
  const int64_t saved = attention_saved(plan, z) - z.q - (z.packed ? 0 : z.own_mixed);
  return saved + 2 * z.q + 2 * z.k + z.stream + attention_backward_extra(plan, z);
}

struct HeadSizes {
  int64_t norm;     // input of the final norm and its statistics
  int64_t normed;   // norm's output in the stream's type
  int64_t input;    // input of the output layer
  int64_t passing;  // its all-gathered rows, during the forward only
  int64_t back;     // gradient of the output layer's input, while it is computed
  int64_t logits;
  int64_t per_token;
  // > 0: the loss is computed in chunks of this many tokens; instead of logits, the gradient of the
  // input is held
  int64_t part;
};

HeadSizes head_sizes(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t T = plan.tokens();
  HeadSizes s{};
  s.norm = z.stream + z.stats;
  s.normed = z.stream;
  s.input = z.normed;
  s.passing = z.gathered;
  s.back = z.product + (plan.sequence_parallel ? z.part + z.gathered : z.cast);
  s.logits = T * plan.vocabulary.padded_size / plan.tensor /
             (plan.splits_vocabulary() ? plan.pipeline : 1) * plan.bytes.model;
  // Target, log-sum-exp, ignore flag, loss mask
  s.per_token = T * (kIdBytes + plan.bytes.sum + 1 + 4);
  if (plan.model().cross_entropy_fusion_impl != CrossEntropyFusion::kLinear) return s;
  const int64_t columns = plan.vocabulary.padded_size / plan.tensor,
                given = plan.model().cross_entropy_chunk_tokens;
  s.part = std::min(T, given > 0 ? given : cross_entropy_chunk(T, columns, plan.bytes.model));
  s.logits = 0;
  s.input = z.product;
  s.back = plan.bytes.residual == plan.bytes.model
               ? 0
               : T * plan.model().hidden_size * plan.bytes.residual;
  s.passing = plan.sequence_parallel ? s.back : 0;
  s.per_token = T * (1 + plan.bytes.sum);  // ignore flag, loss mask
  return s;
}

// Units of full recomputation in a chunk, and the number of layers in the longest one.
struct Recomputed {
  int64_t units = 0, layers = 0, longest = 0;
};

Recomputed recomputed(const TransformerConfig& c, int64_t num_layers) {
  if (c.recompute_granularity != RecomputeGranularity::kFull) return {};
  if (c.recompute_method == RecomputeMethod::kBlock) {
    const int64_t layers = std::min(num_layers, c.recompute_num_layers);
    return {layers, layers, layers > 0 ? 1 : 0};
  }
  return {ceil_div(num_layers, c.recompute_num_layers), num_layers,
          std::min(num_layers, c.recompute_num_layers)};
}

}  // namespace

SavedBytes& SavedBytes::operator+=(const SavedBytes& other) {
  residual += other.residual;
  norms += other.norms;
  attention += other.attention;
  mlp += other.mlp;
  ends += other.ends;
  return *this;
}

SavedBytes& SavedBytes::operator-=(const SavedBytes& other) {
  residual -= other.residual;
  norms -= other.norms;
  attention -= other.attention;
  mlp -= other.mlp;
  ends -= other.ends;
  return *this;
}

SavedBytes layer_saved_bytes(const LayoutPlan& plan, int64_t layer_number) {
  return saved_by_layer(plan, layer_sizes(plan, layer_number));
}

PassBytes pass_bytes(const LayoutPlan& plan, int stage, int chunk) {
  const TransformerConfig& c = plan.model();
  const StageSlice slice = plan.stages.slice(stage, chunk);
  const Recomputed again = recomputed(c, slice.num_layers);
  const LayerSizes any = layer_sizes(plan, std::max<int64_t>(1, slice.first_layer + 1));
  const int64_t num_offloaded = c.num_offloaded_layers(slice.num_layers, slice.head);
  PassBytes pass;
  // The chunk's output gradient is held by the caller until the end and not counted for the last
  // layer; the other layers count their output gradients. In a chunk with the output layer, that
  // gradient comes from the output layer and is added below.
  const int64_t arrived = slice.head ? 0 : any.stream;
  // Peaks since the start of the pass. `first_`: while transfers of the previous pass may still be
  // in flight.
  int64_t layer_forward_most = 0, layer_backward_most = 0, first_backward_most = 0;
  int64_t unrecorded = 0, unit_saved = 0, unit_backward = 0, plain_saved = 0;
  std::vector<int64_t> given, taken;  // offloaded bytes by half layer
  for (int64_t i = again.layers; i < slice.num_layers; ++i) {
    const OffloadedBytes o =
        i < num_offloaded ? offloaded_by_layer(plan, layer_sizes(plan, slice.first_layer + i + 1))
                          : OffloadedBytes{};
    given.insert(given.end(), o.given_by_half, o.given_by_half + 2);
    taken.insert(taken.end(), o.taken_by_half, o.taken_by_half + 2);
  }
  const auto given_in = [&](int64_t first, int64_t last) {
    int64_t bytes = 0;
    for (int64_t half = std::max<int64_t>(0, first); half < last; ++half)
      bytes += given[static_cast<size_t>(half)];
    return bytes;
  };
  const int64_t in_flight = c.fine_grained_offloading_max_inflight_offloads;
  const int64_t num_halves = static_cast<int64_t>(given.size());
  // Bytes in transfer to the host while half layer `half` runs, without those of the other half of
  // the same layer.
  const auto leaving = [&](int64_t half) { return given_in(half - in_flight, half / 2 * 2); };
  pass.leaving = given_in(num_halves - in_flight, num_halves);
  // Still in transfer to the host while the output layer runs
  int64_t at_the_head = given_in(num_halves - 1 - in_flight, num_halves - 1);
  // Bytes being reloaded while half layer `half` runs backward: those of the nearest half layer
  // before it that offloads. The first half of an offloaded layer is counted with its layer.
  const auto reloading = [&](int64_t half) {
    for (int64_t before = half - 1; before >= 0; --before)
      if (taken[static_cast<size_t>(before)] > 0) return taken[static_cast<size_t>(before)];
    return int64_t{0};
  };
  // Number of reloaded half layers that the backward has used, including half layer `half`. Each
  // use waits for one transfer to the host and frees its bytes.
  const auto uses_from = [&](int64_t half) {
    return std::count_if(taken.begin() + half, taken.end(),
                         [](int64_t bytes) { return bytes > 0; });
  };
  for (int64_t i = 0; i < slice.num_layers; ++i) {
    const LayerSizes z = layer_sizes(plan, slice.first_layer + i + 1);
    SavedBytes saved = saved_by_layer(plan, z);
    pass.pending += layer_pending(plan, z);
    pass.deferred_extra = std::max(pass.deferred_extra, deferred_extra(plan, z));
    if (i < again.layers) {
      unrecorded = std::max(unrecorded, unrecorded_forward(plan, z));
      unit_saved = std::max(unit_saved, saved.total());
      unit_backward = std::max(unit_backward, layer_backward(plan, z, /*grad_is_held=*/true).most);
      continue;
    }
    const int64_t half = 2 * (i - again.layers), whole = saved.total();
    const int64_t forward = layer_forward(plan, z, {leaving(half), leaving(half + 1)}).most();
    layer_forward_most = std::max(layer_forward_most, plain_saved + z.stream + forward);
    const bool grad_is_held = !slice.head && i + 1 == slice.num_layers;
    const int64_t own = grad_is_held ? 0 : arrived;  // output gradient
    LayerBackward backward;
    if (i < num_offloaded) {
      const OffloadedBytes o = offloaded_by_layer(plan, z);
      saved -= o.given;
      pass.offloaded += o.taken_by_half[0] + o.taken_by_half[1];
      const int64_t not_reloaded = o.given_by_half[0] - o.taken_by_half[0];
      // Both halves are reloaded before the first is used.
      backward = layer_backward(plan, z, grad_is_held, not_reloaded, {0, reloading(half)});
    } else {
      backward = layer_backward(plan, z, grad_is_held, 0, {reloading(half), reloading(half)});
    }
    const int64_t before = plain_saved + whole + own;
    layer_backward_most = std::max(layer_backward_most, before + backward.most);
    if (uses_from(half) <= in_flight) {
      first_backward_most = std::max(first_backward_most, before + backward.most);
    } else if (uses_from(half + 1) <= in_flight) {
      first_backward_most = std::max(first_backward_most, before + backward.first_half);
    }
    pass.saved += saved;
    plain_saved += saved.total();
  }
  // In addition to the saved bytes.
  layer_forward_most -= plain_saved;
  layer_backward_most -= plain_saved;
  first_backward_most -= plain_saved;
  if (again.units > 0) {
    // Inputs distributed over the tensor ranks are gathered for the backward of their unit.
    const bool parts = c.distribute_saved_activations;
    const bool to_host = num_offloaded > 0 && c.offloads("attn_norm") &&
                         any.stream / plan.bytes.residual >= c.min_offloaded_tensor_size;
    const int64_t unit_layers =
        c.recompute_method == RecomputeMethod::kBlock ? 1 : c.recompute_num_layers;
    const int64_t offloaded_units = !to_host ? 0
                                    : num_offloaded >= again.layers
                                        ? again.units
                                        : std::min(again.units, num_offloaded / unit_layers);
    const int64_t input = parts ? ceil_div(any.stream, plan.tensor) : any.stream;
    pass.saved.residual += (again.units - offloaded_units) * input;
    pass.offloaded += offloaded_units * any.stream;
    // Recomputed layers come before the others. During the backward of a unit its saved tensors
    // (without its input) and its output gradient are held; for the last unit that may be the
    // chunk's output gradient; units before it hold one input less. A distributed input is whole
    // while its unit runs, and so is the first one while the receive from another stage holds it;
    // an offloaded input is freed later, and another one is reloaded meanwhile.
    const int64_t last_input = offloaded_units == again.units ? 0 : input;
    int64_t whole =
        parts ? any.stream - input + (slice.embedding || again.units == 1 ? 0 : any.stream) : 0;
    whole += std::min(offloaded_units, in_flight + (last_input == 0 ? 1 : 0)) * any.stream;
    if (given.empty())
      (last_input == 0 ? pass.leaving : at_the_head) =
          std::min(offloaded_units, in_flight) * any.stream;
    if (!slice.embedding && (parts || offloaded_units > 0)) at_the_head += any.stream;
    layer_forward_most = std::max(layer_forward_most, unrecorded + whole - plain_saved +
                                                          (again.longest > 1 ? any.stream : 0));
    const int64_t own = again.layers < slice.num_layers ? arrived
                        : again.units > 1               ? std::max<int64_t>(0, arrived - last_input)
                                                        : 0;
    layer_backward_most = std::max(layer_backward_most, again.longest * unit_saved + unit_backward +
                                                            own - last_input - plain_saved +
                                                            (offloaded_units > 0 ? any.stream : 0));
    if (given.empty()) first_backward_most = layer_backward_most;
  }
  if (slice.embedding) pass.saved.ends += plan.tokens() * kIdBytes;
  pass.forward_extra = layer_forward_most;
  pass.backward_extra = layer_backward_most;
  pass.backward_first = first_backward_most;
  if (slice.head && plan.splits_vocabulary()) {
    // The final norm is the last operation of the pass; its output is sent, and its backward comes
    // first.
    const HeadSizes head = head_sizes(plan, any);
    pass.saved.ends += head.norm;
    pass.forward_extra = std::max(layer_forward_most - head.norm, head.normed + at_the_head);
    pass.backward_extra = std::max(layer_backward_most - head.norm + any.stream, any.stream);
    pass.backward_first = std::max(first_backward_most - head.norm + any.stream, any.stream);
  } else if (slice.head) {
    const HeadSizes head = head_sizes(plan, any);
    const int64_t saved = head.norm + head.input + head.logits + head.per_token;
    pass.saved.ends += saved;
    if (head.part == 0) pass.pending += head.input + head.logits;
    const bool normed_apart =
        plan.bytes.residual != plan.bytes.model || (head.part > 0 && plan.sequence_parallel);
    const int64_t normed = head.passing + (normed_apart ? head.normed : 0);
    // The gradient of the output layer's input is computed while the logits' gradient is held;
    // after that is freed, the final norm runs backward.
    const int64_t through_logits = head.back - head.per_token;
    const int64_t through_norm =
        (head.part > 0 ? std::max(head.input, head.back) + (plan.sequence_parallel ? any.stream : 0)
                       : std::max(any.normed, any.cast)) +
        any.stream - head.input - head.logits - head.per_token;
    // Layers run before the output layer saves anything, and run backward after it has freed
    // everything.
    pass.forward_extra = std::max(layer_forward_most - saved, normed + at_the_head);
    if (head.part > 0) {
      // The whole input and its gradient, the logits of one chunk and temporaries of the same size;
      // targets, losses, per-token gradients.
      const int64_t columns = plan.vocabulary.padded_size / plan.tensor;
      const int64_t working = head.part * (columns * plan.bytes.model + 4 * plan.bytes.sum) +
                              plan.tokens() * (kIdBytes + 3 * plan.bytes.sum);
      pass.forward_extra =
          std::max(layer_forward_most - saved, normed + at_the_head + head.input + working);
    }
    const int64_t first_back = reloading(static_cast<int64_t>(taken.size()));
    const int64_t through_head = std::max(through_logits, through_norm) + first_back;
    pass.backward_extra = std::max(layer_backward_most - saved + any.stream, through_head);
    pass.backward_first = std::max(first_backward_most - saved + any.stream, through_head);
  }
  return pass;
}

VocabularyBytes vocabulary_bytes(const LayoutPlan& plan) {
  VocabularyBytes v;
  if (!plan.splits_vocabulary()) return v;
  const HeadSizes head = head_sizes(plan, layer_sizes(plan, 1));
  const int64_t T = plan.tokens();
  const int64_t statistics = 3 * T * plan.bytes.sum;
  v.hidden = plan.rows() * plan.model().hidden_size * plan.bytes.residual;
  v.held =
      head.input + head.logits + head.per_token + statistics * (1 + plan.tensor * plan.pipeline);
  v.head_extra = v.held + head.passing;
  v.loss_extra = head.back;
  return v;
}

}  // namespace megatron
