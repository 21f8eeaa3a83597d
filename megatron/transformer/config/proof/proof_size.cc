#include "megatron/transformer/config/proof/proof_size.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <tuple>

#include "megatron/base/check.h"
#include "megatron/transformer/config/detail/layer_list.h"
#include "megatron/transformer/config/letters.h"

namespace megatron {

namespace {

constexpr int64_t kTile = 32, kBlock = 128;
constexpr int64_t kMostLoraRank = 4;
constexpr int64_t kSmallestPattern = 3;  // several windowed layers for one that attends fully

// How many heads there are, and how many keys and values they share.
struct Heads {
  int64_t heads = 0, groups = 0;
};

struct Trait {
  const char* what;
  int64_t count;
};

// Context ranks that exchange heads for tokens, for each kind of exchange that some layer uses.
std::vector<int64_t> exchanges(const TransformerConfig& t, const ProofRanks& ranks) {
  std::set<ContextParallelType> used;
  for (int64_t layer = 1; layer <= t.num_layers; ++layer)
    used.insert(t.context_parallel_type(layer));
  std::vector<int64_t> sizes;
  if (used.count(ContextParallelType::kA2A) > 0) sizes.push_back(ranks.context);
  if (used.count(ContextParallelType::kA2AP2P) > 0) sizes.push_back(ranks.inner_context);
  return sizes;
}

// Numbers of which code can tell only one from several.
std::vector<Trait> traits(const Heads& h, int64_t tensor, const std::vector<int64_t>& exchanges) {
  const int64_t groups = std::max<int64_t>(1, h.groups / tensor);
  std::vector<Trait> all = {
      {"groups of keys and values per tensor rank", groups},
      {"tensor ranks per group of keys and values", std::max<int64_t>(1, tensor / h.groups)},
      {"groups of keys and values", h.groups},
      {"heads per group of keys and values", h.heads / h.groups}};
  for (const int64_t ranks : exchanges) {
    const int64_t shared = std::gcd(groups, ranks);
    all.push_back({"copies of a group of keys and values in an all-to-all", ranks / shared});
    all.push_back({"groups of keys and values per context rank in an all-to-all", groups / shared});
    all.push_back({"heads per context rank in an all-to-all", h.heads / tensor / ranks});
  }
  return all;
}

// The fewest heads with the traits of the model, or with as many of them as there can be.
Heads tiny_heads(const Heads& model, const std::vector<Trait>& wanted, int64_t tensor,
                 const std::vector<int64_t>& exchanges) {
  constexpr int64_t kMostUnits = 8;
  int64_t unit = tensor;
  for (const int64_t ranks : exchanges) unit = std::lcm(unit, tensor * ranks);
  using Cost = std::tuple<int, int, int64_t>;  // traits lost, traits changed, heads
  std::optional<std::pair<Cost, Heads>> best;
  for (int64_t heads = unit; heads <= kMostUnits * unit; heads += unit)
    for (int64_t groups = 1; groups <= heads; ++groups) {
      if (heads % groups != 0 || (groups % tensor != 0 && tensor % groups != 0)) continue;
      if ((heads == groups) != (model.heads == model.groups)) continue;
      const std::vector<Trait> found = traits({heads, groups}, tensor, exchanges);
      Cost cost{0, 0, heads};
      for (size_t i = 0; i < wanted.size(); ++i) {
        const int64_t before = one_or_several(wanted[i].count),
                      after = one_or_several(found[i].count);
        std::get<0>(cost) += after < before;
        std::get<1>(cost) += after != before;
      }
      if (!best || cost < best->first) best = {cost, {heads, groups}};
    }
  MEGATRON_ASSERT(best.has_value());
  return best->second;
}

bool has_blocks(const TransformerConfig& t) {
  return t.is_quantized() && t.fp8_recipe == Fp8Recipe::kBlockwise;
}

// Few features: 8, or 4 of each head if there are many heads; of quantised products a tile, or half
// a tile, which these can still be divided into; all of a rank's heads together are whole blocks.
int64_t tiny_head_size(const TransformerConfig& t, const Heads& h, int64_t tensor) {
  constexpr int64_t kManyHeads = 16, kManyQuantizedHeads = 4;
  const int64_t step = t.is_quantized() ? (h.heads > kManyQuantizedHeads ? kTile / 2 : kTile)
                                        : (h.heads > kManyHeads ? 4 : 8);
  const int64_t unit = tensor * (has_blocks(t) ? kBlock : 1);
  int64_t size = step;
  const auto fits = [&] {
    const auto rotated = static_cast<int64_t>(static_cast<double>(size) * t.rotary_percent);
    return (h.heads + 2 * h.groups) * size % unit == 0 &&  // ranks of a group split its rows
           (!has_blocks(t) || h.heads * size % unit == 0) &&
           (t.position_embedding_type != PositionEmbedding::kRope ||
            (rotated > 0 && rotated % 2 == 0));
  };
  while (!fits()) size += step;
  return size;
}

struct Latents {
  int64_t query, value, head, rotated;
  int64_t step;  // the least difference of values and keys
};

// Widths that differ from each other.
Latents tiny_latents(const TransformerConfig& t, int64_t heads_of_rank) {
  if (has_blocks(t)) {
    const int64_t head = kBlock / std::gcd(heads_of_rank, kBlock);
    return {kBlock, 2 * kBlock, head, kBlock, head};
  }
  constexpr int64_t kHalf = kTile / 2;
  if (t.is_quantized()) return {3 * kHalf, 4 * kHalf, 2 * kHalf, kHalf, kHalf};
  return {12, 14, 6, 4, 2};
}

// Values as much narrower or wider than keys as to be so.
void shrink_latents(TransformerConfig& t, int64_t heads_of_rank, Shrinker& shrinker) {
  const int64_t before = t.v_head_dim - t.query_head_size();
  const Latents tiny = tiny_latents(t, heads_of_rank);
  if (t.q_lora_rank) shrinker.set("--q-lora-rank", t.q_lora_rank, tiny.query);
  shrinker.set("--kv-lora-rank", t.kv_lora_rank, tiny.value);
  shrinker.set("--qk-head-dim", t.qk_head_dim, tiny.head);
  shrinker.set("--qk-pos-emb-head-dim", t.qk_pos_emb_head_dim, tiny.rotated);
  t.kv_channels = t.query_head_size();
  const int64_t wider = before > 0 ? tiny.step : before < 0 ? -tiny.step : 0;
  shrinker.set("--v-head-dim", t.v_head_dim, t.query_head_size() + wider);
}

using Kinds = std::vector<std::string>;

Kinds layer_kinds(const TransformerConfig& t) {
  Kinds kinds;
  for (int64_t layer = 1; layer <= t.num_layers; ++layer)
    kinds.push_back(cat(t.layer_letters(layer), t.window(layer).empty() ? " full " : " window ",
                        static_cast<int>(t.context_parallel_type(layer)), " ",
                        static_cast<int>(t.quantization(layer).recipe)));
  return kinds;
}

Kinds of_segment(const Kinds& kinds, int64_t segments, int64_t segment) {
  const auto layers = static_cast<int64_t>(kinds.size()) / segments;
  return {kinds.begin() + segment * layers, kinds.begin() + (segment + 1) * layers};
}

// Whether some segment has other kinds than the one `distance` segments before it, or, with 0, than
// the first.
bool segments_differ(const Kinds& kinds, int64_t segments, int64_t distance) {
  for (int64_t i = std::max<int64_t>(distance, 1); i < segments; ++i)
    if (of_segment(kinds, segments, i) !=
        of_segment(kinds, segments, distance == 0 ? 0 : i - distance))
      return true;
  return false;
}

// See shrink_depth().
bool keeps_kinds(const Kinds& before, const Kinds& after, int64_t segments, int64_t stages) {
  for (const int64_t distance : {int64_t{0}, int64_t{1}, stages})
    if (segments_differ(before, segments, distance) && !segments_differ(after, segments, distance))
      return false;
  for (int64_t i = 0; i < segments; ++i) {
    const Kinds had = of_segment(before, segments, i), has = of_segment(after, segments, i);
    for (const std::string& kind : had)
      if (std::find(has.begin(), has.end(), kind) == has.end()) return false;
  }
  return true;
}

// n of --window-attn-skip-freq n, 0 for none and for a list.
int64_t window_period(const TransformerConfig& t) {
  return parse_layer_period(t.window_attn_skip_freq).value_or(0);
}

// The first layers, with a full one after every `period` if that is not 0.
TransformerConfig first_layers(TransformerConfig t, int64_t layers, int64_t period) {
  if (t.cp_comm_type.size() > 1) t.cp_comm_type.resize(static_cast<size_t>(layers));
  if (period > 0) {
    t.window_attn_skip_freq = cat(period);
  } else if (!t.window_attn_skip_freq.empty()) {
    std::string list;
    for (int64_t layer = 1; layer <= layers; ++layer)
      list += cat(layer > 1 ? "," : "", t.window(layer).empty() ? 0 : 1);
    t.window_attn_skip_freq = cat("[", list, "]");
  }
  if (!parse_layer_period(t.moe_layer_freq)) {
    std::string list;
    for (int64_t layer = 1; layer <= layers; ++layer)
      list += cat(layer > 1 ? "," : "", t.is_moe_layer(layer) ? 1 : 0);
    t.moe_layer_freq = cat("[", list, "]");
  }
  t.num_layers = layers;
  if (t.first_last_layers_bf16)
    for (int64_t* edge : {&t.num_layers_at_start_in_bf16, &t.num_layers_at_end_in_bf16})
      *edge = one_or_several(*edge);
  return t;
}

// The model with fewer layers, or none if only all of them keep the structure.
std::optional<TransformerConfig> with_fewer_layers(const TransformerConfig& t, int64_t segments,
                                                   int64_t stages) {
  const int64_t most = t.num_layers / segments, period = window_period(t);
  const int64_t shortest = period > t.num_layers ? period : std::min(period, kSmallestPattern);
  // Several recomputed layers, and some after them.
  const bool rest = t.recompute_granularity == RecomputeGranularity::kFull &&
                    t.recompute_num_layers > 1 && t.recompute_num_layers < most;
  const Kinds kinds = layer_kinds(t);
  for (int64_t layers = rest ? 3 : 2; layers < most; ++layers)
    for (int64_t n = period; n >= shortest; --n) {
      TransformerConfig fewer = first_layers(t, segments * layers, n);
      if (keeps_kinds(kinds, layer_kinds(fewer), segments, stages)) return fewer;
    }
  return {};
}

}  // namespace

void Shrinker::set(const char* flag, int64_t& value, int64_t to) {
  if (value != to) note(cat(flag, " ", value, " -> ", to));
  value = to;
}

void Shrinker::set(const char* flag, std::optional<int64_t>& value, int64_t to) {
  if (value != to) note(value ? cat(flag, " ", *value, " -> ", to) : cat(flag, " ", to));
  value = to;
}

void Shrinker::set(const char* flag, bool& value, bool to) {
  if (value != to) note(cat(flag, to ? " on" : " off"));
  value = to;
}

void Shrinker::keep_several(const char* what, int64_t before, int64_t after) {
  if (one_or_several(after) < one_or_several(before))
    lose(cat(after, " ", what, ", ", before, " in the model"));
}

int64_t product_tile(const TransformerConfig& t) {
  return has_blocks(t) ? kBlock : t.is_quantized() ? kTile : 1;
}

void shrink_layer(TransformerConfig& t, const ProofRanks& before, const ProofRanks& ranks,
                  Shrinker& shrinker) {
  const int64_t tp = ranks.tensor, unit = tp * ranks.context;
  const std::vector<int64_t> widths = exchanges(t, ranks);
  const Heads model = t.attends() ? Heads{t.num_attention_heads, t.query_groups()} : Heads{tp, tp};
  const std::vector<Trait> wanted = traits(model, before.tensor, exchanges(t, before));
  const Heads tiny = tiny_heads(model, wanted, tp, widths);
  const std::vector<Trait> found = traits(tiny, tp, widths);
  for (size_t i = 0; i < wanted.size(); ++i)
    shrinker.keep_several(wanted[i].what, wanted[i].count, found[i].count);
  const int64_t head_size = tiny_head_size(t, tiny, tp), tile = product_tile(t),
                hidden = has_blocks(t) ? kBlock : tiny.heads * head_size;
  if (has_blocks(t))
    shrinker.keep_several("blocks of the hidden size", t.hidden_size / kBlock, hidden / kBlock);
  const double widening =
      static_cast<double>(t.ffn_hidden_size) / static_cast<double>(t.hidden_size);
  // Sizes of attention mean nothing where no layer has any.
  shrinker.set("--num-attention-heads", t.num_attention_heads, t.attends() ? tiny.heads : 0);
  if (!t.attends()) shrinker.set("--group-query-attention", t.group_query_attention, false);
  if (t.group_query_attention) shrinker.set("--num-query-groups", t.num_query_groups, tiny.groups);
  if (t.multi_latent_attention)
    shrink_latents(t, tiny.heads / tp, shrinker);
  else
    shrinker.set("--kv-channels", t.kv_channels, t.attends() ? head_size : 0);
  if (!t.mrope_section.empty()) {
    const int64_t pairs = t.rotary_width() / 2, side = std::max<int64_t>(1, pairs / 3);
    t.mrope_section = {pairs - 2 * side, side, side};
    shrinker.note(cat("--mrope-section ", pairs - 2 * side, " ", side, " ", side));
  }
  shrinker.set("--hidden-size", t.hidden_size, hidden);
  shrinker.set(
      "--ffn-hidden-size", t.ffn_hidden_size,
      std::max<int64_t>(1, std::llround(widening * static_cast<double>(hidden)) / (tp * tile)) *
          tp * tile);
  for (std::vector<double>* factors : {&t.longrope_short_factor, &t.longrope_long_factor})
    if (!factors->empty()) factors->resize(static_cast<size_t>(t.rotary_width() / 2), 1.0);
  shrink_letters(t, before.tensor, tp, shrinker);
  const int64_t length_before = t.seq_length;
  // Two chunks for each context rank; whole tiles for quantised linears, also for those that
  // multiply the rows of one tensor rank
  const bool undivided = t.multi_latent_attention || t.moe_latent_size;
  const int64_t rows = has_blocks(t) ? tile / std::gcd(tile, ranks.samples) : tile;
  const int64_t quantum = std::lcm(2 * unit, rows * (undivided ? unit : ranks.context));
  const int64_t length = std::max<int64_t>(16, 2 * unit * 2);
  shrinker.set("--seq-length", t.seq_length, (length + quantum - 1) / quantum * quantum);
  t.max_position_embeddings = t.seq_length;
  for (int64_t& side : t.window_size)
    if (side > 0) side = std::max<int64_t>(1, side * t.seq_length / length_before);
  if (t.lora_rank > kMostLoraRank) {  // keep the scale alpha / rank
    t.lora_alpha =
        t.lora_alpha.value_or(double(t.lora_rank)) * double(kMostLoraRank) / double(t.lora_rank);
    shrinker.set("--lora-rank", t.lora_rank, kMostLoraRank);
  }
  if (t.offloads_activations())
    shrinker.set("--min-offloaded-tensor-size", t.min_offloaded_tensor_size, int64_t{1});
}

void shrink_depth(TransformerConfig& t, int64_t segments, int64_t stages, Shrinker& shrinker) {
  shrinker.set("--mtp-num-layers", t.mtp_num_layers, one_or_several(t.mtp_num_layers));
  const std::optional<TransformerConfig> fewer = with_fewer_layers(t, segments, stages);
  if (!fewer) return;
  const int64_t before = t.num_layers / segments, after = fewer->num_layers / segments;
  shrinker.set("--num-layers", t.num_layers, fewer->num_layers);
  if (t.window_attn_skip_freq != fewer->window_attn_skip_freq)
    shrinker.note(cat("--window-attn-skip-freq ", t.window_attn_skip_freq, " -> ",
                      fewer->window_attn_skip_freq));
  if (t.cp_comm_type != fewer->cp_comm_type)
    shrinker.note(cat("--cp-comm-type of the first ", t.num_layers, " layers"));
  if (t.moe_layer_freq != fewer->moe_layer_freq)
    shrinker.note(cat("--moe-layer-freq ", t.moe_layer_freq, " -> ", fewer->moe_layer_freq));
  shrinker.set("--num-layers-at-start-in-bf16", t.num_layers_at_start_in_bf16,
               fewer->num_layers_at_start_in_bf16);
  shrinker.set("--num-layers-at-end-in-bf16", t.num_layers_at_end_in_bf16,
               fewer->num_layers_at_end_in_bf16);
  t.moe_layer_freq = fewer->moe_layer_freq;
  t.window_attn_skip_freq = fewer->window_attn_skip_freq;
  t.cp_comm_type = fewer->cp_comm_type;
  // Of each segment's layers all, or not all.
  const auto part = [&](int64_t layers) {
    return layers < before ? std::min(layers, after - 1) : std::min(layers, t.num_layers);
  };
  shrinker.set("--recompute-num-layers", t.recompute_num_layers, part(t.recompute_num_layers));
  shrinker.set("--cpu-offloading-num-layers", t.cpu_offloading_num_layers,
               std::min(part(t.cpu_offloading_num_layers), t.num_layers - 1));
}

SampleSize sample_size(const TransformerConfig& t) {
  const int64_t layer = t.multi_latent_attention ? 2 : 1;
  int64_t layers = 1 + layer * (t.num_layers + t.mtp_num_layers);
  for (int64_t i = 1; i <= t.num_layers; ++i) layers += t.is_moe_layer(i) ? 2 : 0;
  return {layers, t.seq_length};
}

void shrink_weights(TransformerConfig& t) {
  // Larger than usual, so that attention and gates matter, but never so that a wide layer, as FP8
  // needs, amplifies what enters it: the rounding of fp64 would grow with every layer and update.
  t.init_method_std = std::min(0.2, 1.6 / std::sqrt(static_cast<double>(t.hidden_size)));
  // Decays of new gated delta nets leave little more of a state than the token's own write, so that
  // an output is (q . k) v: its norm divides by |q . k|, whose inverse square has no mean, and a
  // few tokens near 0 would decide how far a whole gradient is rounded.
  if (t.has_letter('G')) t.layernorm_epsilon = std::max(t.layernorm_epsilon, 0.1);
  if (t.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear)
    t.cross_entropy_chunk_tokens = 5;  // so that there are several chunks
}

}  // namespace megatron
