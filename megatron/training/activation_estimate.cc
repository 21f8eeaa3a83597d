#include "megatron/training/activation_estimate.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"

namespace megatron {

namespace {

constexpr int64_t kIdBytes = 8;                       // a token id, a target
constexpr int64_t kScoreElements = int64_t{1} << 26;  // tensor/attention_unfused.cc
constexpr int64_t kMultiprocessors = 132;             // H100, H200: splits of the deterministic backward

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

// Memory that is taken and given back, step by step, and the most that was taken.
class Track {
 public:
  void take(int64_t bytes) { most_ = std::max(most_, live_ += bytes); }
  void give(int64_t bytes) { live_ -= bytes; }
  // For the time of one operation.
  void touch(int64_t bytes) { most_ = std::max(most_, live_ + bytes); }
  int64_t live() const { return live_; }
  int64_t most() const { return most_; }

 private:
  int64_t live_ = 0, most_ = 0;
};

enum class AttentionKind { kLibrary, kUnfused, kRing, kAllGather };

// The tensors of one layer on one rank, in bytes.
struct LayerSizes {
  int64_t stream;      // R h x
  int64_t normed;      // R h e
  int64_t cast;        // R h x where the norm's output is converted, else 0
  int64_t gathered;    // T h e where rows are gathered over tensor ranks, else 0
  int64_t product;     // T h e: products of linear_proj and linear_fc2, input gradients of linear_qkv and linear_fc1
  int64_t part;        // R h e of them after the reduce-scatter, else 0
  int64_t stats;       // of one norm
  int64_t own_mixed;   // product of linear_qkv
  int64_t mixed;       // ... with the groups that several ranks hold together
  int64_t q, k;        // queries; keys, or values
  int64_t head_stats;  // of both head norms
  int64_t lse;
  int64_t fc1, act;
  bool q_in_place;    // queries are a view of `mixed`
  bool new_q, new_k;  // rotated, or normed
  int64_t a2a = 1;    // ranks that exchange tokens for heads
  int64_t exchanged = 0;
  int64_t mask = 0;
  int64_t block_scores = 0;  // of the blocks that p2p and all_gather compute without a library
  AttentionKind kind;
};

bool attends_unfused(const LayoutPlan& plan, int64_t layer, bool documents) {
  const TransformerConfig& c = plan.model();
  if (c.attention_backend == AttentionBackend::kUnfused || c.attention_backend == AttentionBackend::kLocal) return true;
  const std::vector<int64_t> window = c.window(layer);
  const bool windowed = !window.empty() && window[0] >= 0 && window[0] < c.seq_length - 1;
  if (documents || c.attention_dropout > 0 || windowed) return true;
  return plan.on_gpu && (plan.bytes.model != 2 || c.kv_channels % 8 != 0 || c.kv_channels > 256);
}

LayerSizes layer_sizes(const LayoutPlan& plan, int64_t layer) {
  const TransformerConfig& c = plan.model();
  const int64_t t = plan.tensor, T = plan.tokens(), R = plan.rows(), h = c.hidden_size, d = c.kv_channels,
                e = plan.bytes.model;
  const int64_t per_row = c.normalization == Normalization::kLayerNorm ? 2 : 1, sum = plan.bytes.sum;
  const int64_t heads = c.num_attention_heads / t, groups = std::max<int64_t>(1, c.query_groups() / t);
  const int64_t sharing = std::max<int64_t>(1, t / c.query_groups());  // ranks that hold one group together
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
  z.new_q = z.new_k = c.qk_layernorm || c.position_embedding_type == PositionEmbedding::kRope;

  const DataConfig& data = plan.arguments.data;
  const bool documents = data.reset_attention_mask || data.dataloader_inter_document_masking;
  const ContextParallelType type = plan.context > 1 ? c.context_parallel_type(layer) : ContextParallelType::kA2A;
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
  const bool whole_sequence = z.kind == AttentionKind::kLibrary || z.kind == AttentionKind::kUnfused;
  if (!whole_sequence && (!plan.on_gpu || attends_unfused(plan, layer, documents))) {
    const int64_t queries = c.seq_length / plan.context * z.a2a;
    z.block_scores = plan.arguments.training.micro_batch_size * heads / z.a2a * queries * queries * sum;
  }
  if (documents && whole_sequence) z.mask = plan.arguments.training.micro_batch_size * c.seq_length * c.seq_length;
  return z;
}

// fp32 scores of the largest piece that the unfused path computes at a time.
int64_t score_bytes(const LayoutPlan& plan, const LayerSizes& z, int64_t queries, int64_t keys) {
  const TransformerConfig& c = plan.model();
  const int64_t b = plan.arguments.training.micro_batch_size,
                heads = std::max<int64_t>(1, c.num_attention_heads / plan.tensor / z.a2a);
  const int64_t groups = std::min(heads, std::max<int64_t>(1, c.query_groups() / plan.tensor / z.a2a));
  const int64_t group = heads / groups * queries * keys;
  if (b * groups * group <= kScoreElements) return b * groups * group * plan.bytes.sum;
  return std::clamp<int64_t>(kScoreElements / std::max<int64_t>(1, group), 1, groups) * group * plan.bytes.sum;
}

// What core attention takes beyond its inputs and its output, while it runs.
int64_t attention_forward_extra(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t s = plan.model().seq_length, wide = plan.bytes.sum / plan.bytes.model;
  switch (z.kind) {
    case AttentionKind::kLibrary:
      return 0;
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
  const int64_t expanded = z.q > z.k ? 2 * z.q : 0;  // gradients of repeated keys and values, before they are summed
  // The deterministic backward sums the gradient of the queries in fp32, in as many copies as keep the GPU busy.
  const int64_t splits = ceil_div(kMultiprocessors, b * heads);
  const int64_t copies =
      plan.on_gpu ? splits * b * round_up(s / plan.context * z.a2a, 128) * heads * round_up(c.kv_channels, 32) * 4 : 0;
  switch (z.kind) {
    case AttentionKind::kLibrary:
      return expanded + copies + z.lse;
    case AttentionKind::kUnfused:
      return (c.attention_dropout > 0 ? 5 : 3) * score_bytes(plan, z, s, s) + wide * (2 * z.q + 2 * z.k) + s * s;
    case AttentionKind::kRing:
      return (4 + 4 * wide) * z.k + wide * z.q + expanded + copies + z.lse + 2 * z.block_scores;
    case AttentionKind::kAllGather:
      return plan.context * (4 + 2 * wide) * z.k + expanded + copies + z.lse + 2 * z.block_scores;
  }
  return 0;
}

// What attention saves: of linear_qkv's product up to its own output.
int64_t attention_saved(const LayoutPlan& plan, const LayerSizes& z) {
  const TransformerConfig& c = plan.model();
  int64_t saved = z.mask;
  if (c.qk_layernorm) saved += z.q + z.k + z.head_stats;  // what the head norms normed
  if (z.exchanged > 0) {
    saved += z.exchanged;
  } else {
    saved += z.mixed + (z.new_q || !z.q_in_place ? z.q : 0) + (z.new_k ? z.k : 0);
  }
  saved += z.q;  // the input of linear_proj
  if (z.kind == AttentionKind::kUnfused || c.recomputes("core_attn")) return saved;
  if (z.exchanged > 0) saved += z.q;  // before the exchange back
  return saved + z.lse;
}

// What the norm of a branch's output saves: its input and its statistics; 0 without one.
int64_t post_norm_saved(const LayoutPlan& plan, const LayerSizes& z) {
  return plan.model().has_post_norm() ? (z.part > 0 ? z.part : z.product) + z.stats : 0;
}

SavedBytes saved_by_layer(const LayoutPlan& plan, const LayerSizes& z) {
  SavedBytes saved;
  saved.residual = 2 * z.stream;
  saved.norms = 2 * (z.stats + (plan.model().recomputes("layernorm") ? 0 : z.normed));
  if (!plan.model().has_pre_norm()) saved.norms = 0;
  saved.norms += 2 * post_norm_saved(plan, z);
  saved.attention = attention_saved(plan, z);
  saved.mlp = z.fc1 + z.act;
  return saved;
}

// The input of a column-parallel layer: normed, gathered, multiplied; `product` stays.
void norm_and_multiply(const LayoutPlan& plan, const LayerSizes& z, int64_t product, Track& track) {
  const bool norm = plan.model().has_pre_norm();
  if (norm) track.take(z.stats + z.normed + z.cast);
  track.take(z.gathered + product);
  track.give(z.gathered + (norm ? z.cast : 0));
  if (norm && plan.model().recomputes("layernorm")) track.give(z.normed);
}

// The product of a row-parallel layer, summed over tensor ranks, and its sum with the residual stream, which stays.
void multiply_and_add(const LayoutPlan& plan, const LayerSizes& z, Track& track) {
  track.take(z.product + z.part);
  if (z.part > 0) track.give(z.product);
  const int64_t branch = z.part > 0 ? z.part : z.product;
  track.take(post_norm_saved(plan, z));
  track.take(z.stream);
  track.give(branch);
}

// Forward of a layer whose input is counted already. Ends with what it saves, without its input, and its output.
Track layer_forward(const LayoutPlan& plan, const LayerSizes& z) {
  Track track;
  norm_and_multiply(plan, z, z.own_mixed, track);
  if (z.mixed != z.own_mixed) {
    track.take(2 * z.mixed);  // gathered, then put in order
    track.give(z.mixed + z.own_mixed);
  }
  const int64_t before = track.live() - z.mixed;
  if (!z.q_in_place) track.take(z.q);
  if (plan.model().qk_layernorm) track.take((z.q_in_place ? z.q : 0) + z.k + z.head_stats + z.q + z.k);
  if (plan.model().position_embedding_type == PositionEmbedding::kRope) track.take(z.q + z.k);
  if (z.exchanged > 0) track.take(2 * z.exchanged);
  track.take(z.q + z.lse);
  track.touch(attention_forward_extra(plan, z));
  if (z.exchanged > 0) track.touch(2 * z.q);
  track.give(track.live() - before);
  track.take(attention_saved(plan, z));
  multiply_and_add(plan, z, track);
  const int64_t branch = z.part > 0 ? z.part : z.product;
  track.take(branch);  // attention's output lives as long as its layer runs
  norm_and_multiply(plan, z, z.fc1, track);
  track.take(z.act);
  multiply_and_add(plan, z, track);
  track.give(branch);
  return track;
}

// The most that a layer takes while nothing is recorded, its input and its output not counted.
int64_t unrecorded_forward(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t attention = z.mixed + (z.new_q || !z.q_in_place ? z.q : 0) + (z.new_k ? z.k : 0) + z.exchanged + z.q +
                            std::max(attention_forward_extra(plan, z), z.product + z.part);
  const int64_t mlp = 2 * z.stream + z.fc1 + std::max(z.normed + z.cast + z.gathered, z.act + z.product + z.part);
  return std::max(attention, mlp);
}

// Back through norm and product of a column-parallel layer, from dy, which is counted. Ends with the gradient for the
// stream in place of dy and of what was saved.
void column_backward(const LayoutPlan& plan, const LayerSizes& z, int64_t dy, Track& track) {
  const bool recompute = plan.model().recomputes("layernorm");
  track.take(z.product);
  track.take(z.part);
  track.touch(z.gathered + (recompute ? z.normed + z.cast : 0));
  if (z.part > 0) track.give(z.product);
  track.take(z.stream + z.cast);
  const int64_t normed = plan.model().has_pre_norm() ? z.stats + (recompute ? 0 : z.normed) : 0;
  track.give(dy + z.cast + (z.part > 0 ? z.part : z.product) + normed);
  track.touch(z.stream);  // the sum with the gradient that took the short way
  track.give(z.stream);   // that gradient
}

// Backward of a layer, beyond what it saved, from the gradient of its output, which is counted as 0.
Track layer_backward(const LayoutPlan& plan, const LayerSizes& z) {
  const TransformerConfig& c = plan.model();
  Track track;
  const int64_t branch =
      c.hidden_dropout > 0 || z.cast > 0 ? z.normed : 0;  // gradient of a branch, where it is another tensor
  const auto row_backward = [&](int64_t input, int64_t input_saved) {
    track.give(post_norm_saved(plan, z));
    track.take(branch);
    track.take(z.gathered + input);
    track.give(z.gathered + branch + input_saved);
  };
  row_backward(z.act, z.act);
  track.take(z.fc1);
  track.give(z.act + z.fc1);  // the gradient of the activation; what it saved
  column_backward(plan, z, z.fc1, track);
  track.give(z.stream);  // the stream after attention
  const int64_t attention = attention_saved(plan, z);
  row_backward(z.q, 0);
  if (z.exchanged > 0) track.touch(2 * z.q);
  track.take(z.q + 2 * z.k);
  track.touch(attention_backward_extra(plan, z));
  if (z.exchanged > 0) track.touch(2 * z.exchanged);
  if (z.new_q) track.touch(z.q + z.k);
  track.take(z.mixed);
  track.give(z.q + z.q + 2 * z.k + attention);
  if (z.mixed != z.own_mixed) {
    track.touch(z.mixed + z.own_mixed);
    track.give(z.mixed - z.own_mixed);
  }
  column_backward(plan, z, z.own_mixed, track);
  return track;
}

// What stays for the weight gradients of a layer when they are an action of their own: inputs and gradients of
// products.
int64_t layer_pending(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t normed = plan.model().recomputes("layernorm") ? 0 : z.normed;
  return 2 * (z.stream + z.stats + normed) + z.own_mixed + z.q + z.fc1 + z.act + 2 * z.product;
}

// Beyond that, in the backward of attention: what it saved, gradients of its output, queries, keys and values, and of
// the stream.
int64_t deferred_extra(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t saved =
      attention_saved(plan, z) - z.q - z.own_mixed;  // its output, and as much as the product, are in layer_pending
  return saved + 2 * z.q + 2 * z.k + z.stream + attention_backward_extra(plan, z);
}

struct HeadSizes {
  int64_t norm;    // input of the final norm and its statistics
  int64_t normed;  // in the type of the stream
  int64_t input;   // of the output layer
  int64_t cast;    // whole rows in the type of the stream, where they are converted
  int64_t logits;
  int64_t per_token;
};

HeadSizes head_sizes(const LayoutPlan& plan, const LayerSizes& z) {
  const int64_t T = plan.tokens(), h = plan.model().hidden_size;
  HeadSizes s{};
  s.norm = z.stream + z.stats;
  s.normed = z.stream;
  s.input = z.product;
  s.cast = plan.bytes.residual == plan.bytes.model || !plan.sequence_parallel ? 0 : T * h * plan.bytes.residual;
  s.logits = T * plan.padded_vocab_size / plan.tensor * plan.bytes.model;
  s.per_token = T * (kIdBytes + plan.bytes.sum + 1 + 4);  // target, log-sum-exp, whether ignored, loss mask
  return s;
}

// Units of full recomputation in a chunk, and the layers that the longest of them has.
struct Recomputed {
  int64_t units = 0, layers = 0, longest = 0;
};

Recomputed recomputed(const TransformerConfig& c, int64_t num_layers) {
  if (c.recompute_granularity != RecomputeGranularity::kFull) return {};
  if (c.recompute_method == RecomputeMethod::kBlock) {
    const int64_t layers = std::min(num_layers, c.recompute_num_layers);
    return {layers, layers, layers > 0 ? 1 : 0};
  }
  return {ceil_div(num_layers, c.recompute_num_layers), num_layers, std::min(num_layers, c.recompute_num_layers)};
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

SavedBytes layer_saved_bytes(const LayoutPlan& plan, int64_t layer_number) {
  return saved_by_layer(plan, layer_sizes(plan, layer_number));
}

PassBytes pass_bytes(const LayoutPlan& plan, int stage, int chunk) {
  const StageSlice slice = plan.stages.slice(stage, chunk);
  const Recomputed again = recomputed(plan.model(), slice.num_layers);
  const LayerSizes any = layer_sizes(plan, std::max<int64_t>(1, slice.first_layer + 1));
  PassBytes pass;
  int64_t layer_forward_most = 0, layer_backward_most = 0;  // beyond what is saved
  int64_t unrecorded = 0, unit_saved = 0, unit_backward = 0, plain_saved = 0;
  for (int64_t i = 0; i < slice.num_layers; ++i) {
    const LayerSizes z = layer_sizes(plan, slice.first_layer + i + 1);
    const SavedBytes saved = saved_by_layer(plan, z);
    pass.pending += layer_pending(plan, z);
    pass.deferred_extra = std::max(pass.deferred_extra, deferred_extra(plan, z));
    if (i < again.layers) {
      unrecorded = std::max(unrecorded, unrecorded_forward(plan, z));
      unit_saved = std::max(unit_saved, saved.total());
      unit_backward = std::max(unit_backward, layer_backward(plan, z).most());
      continue;
    }
    pass.saved += saved;
    plain_saved += saved.total();
    // The output takes the place of the next layer's input.
    layer_forward_most = std::max(layer_forward_most, layer_forward(plan, z).most() - (saved.total() - z.stream));
    layer_backward_most = std::max(layer_backward_most, layer_backward(plan, z).most());
  }
  if (again.units > 0) {
    pass.saved.residual += again.units * any.stream;
    pass.keeps_output = again.layers == slice.num_layers && !slice.head;
    if (pass.keeps_output) pass.saved.residual += any.stream;
    // Recomputed layers come before the others. One unit is held whole, its input excepted, while it is gone back
    // through, with its output, the one that the forward pass made, and the gradient of that.
    layer_forward_most = std::max(layer_forward_most, unrecorded - plain_saved + (again.longest > 1 ? any.stream : 0) -
                                                          (pass.keeps_output ? any.stream : 0));
    layer_backward_most =
        std::max(layer_backward_most, again.longest * unit_saved + unit_backward + any.stream - plain_saved);
  }
  // Weight gradients hold the leaves that a unit or the segment starts from, and so the gradients of these.
  pass.pending += (again.units + (slice.embedding || again.units > 0 ? 0 : 1)) * any.stream;
  if (slice.embedding) pass.saved.ends += plan.tokens() * kIdBytes;
  pass.forward_extra = layer_forward_most;
  pass.backward_extra = layer_backward_most;
  if (slice.head) {
    const HeadSizes head = head_sizes(plan, any);
    const int64_t saved = head.norm + head.input + head.logits + head.per_token;
    pass.saved.ends += saved;
    pass.pending += head.input + head.logits;
    const int64_t normed =
        plan.sequence_parallel || plan.bytes.residual != plan.bytes.model ? head.normed + head.cast : 0;
    // Layers run before the head saves anything, and go back after it has given everything up.
    const int64_t row_grads = head.cast + (plan.sequence_parallel ? any.stream : 0);
    pass.forward_extra = std::max(layer_forward_most - saved, normed);
    pass.backward_extra = std::max(layer_backward_most - saved + any.stream, head.input + row_grads + any.stream);
  }
  return pass;
}

}  // namespace megatron
