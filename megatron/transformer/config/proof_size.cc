#include "megatron/transformer/config/proof_size.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "megatron/base/check.h"

namespace megatron {

namespace {

constexpr int64_t kMostLoraRank = 4;

// Whether layers are configured one by one, so that their number is part of the structure.
bool counts_layers(const TransformerConfig& t) {
  if (t.cp_comm_type.size() > 1 || t.window_attn_skip_freq.starts_with('[')) return true;
  for (int64_t layer = 2; layer <= t.num_layers; ++layer)
    if (t.layer_letters(layer) != t.layer_letters(1)) return true;
  return false;
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

void shrink_layer(TransformerConfig& t, const ProofRanks& ranks, Shrinker& shrinker) {
  const int64_t tp = ranks.tensor, unit = tp * ranks.context;
  const int64_t heads_before = t.num_attention_heads, groups_before = t.query_groups();
  // Heads per group: as few as still test grouping
  const int64_t ratio = std::min<int64_t>(heads_before / groups_before, 2);
  int64_t groups = groups_before >= ranks.tensor_before
                       ? (groups_before % (ranks.tensor_before * ranks.context) == 0 ? unit : tp)
                       : std::max<int64_t>(1, tp * groups_before / ranks.tensor_before);
  int64_t heads = std::lcm(groups * ratio, unit);
  if (groups_before == heads_before) groups = heads;
  int64_t head_size = 8;
  // Ranks that share a KV group split all of its rows
  while ((heads + 2 * groups) * head_size % tp != 0) head_size += 8;
  const int64_t hidden = heads * head_size;
  const double widening =
      static_cast<double>(t.ffn_hidden_size) / static_cast<double>(t.hidden_size);
  shrinker.set("--num-attention-heads", t.num_attention_heads, heads);
  if (t.group_query_attention) shrinker.set("--num-query-groups", t.num_query_groups, groups);
  shrinker.set("--kv-channels", t.kv_channels, head_size);
  shrinker.set("--hidden-size", t.hidden_size, hidden);
  shrinker.set(
      "--ffn-hidden-size", t.ffn_hidden_size,
      std::max<int64_t>(tp, std::llround(widening * static_cast<double>(hidden)) / tp * tp));
  const int64_t length_before = t.seq_length, length = std::max<int64_t>(16, 2 * unit * 2);
  shrinker.set("--seq-length", t.seq_length, (length + 2 * unit - 1) / (2 * unit) * (2 * unit));
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

void shrink_depth(TransformerConfig& t, int64_t segments, Shrinker& shrinker) {
  if (counts_layers(t)) return;
  int64_t& layers = t.num_layers;
  if (layers / segments > 2) shrinker.set("--num-layers", layers, segments * 2);
  if (t.recompute_num_layers > layers)
    shrinker.set("--recompute-num-layers", t.recompute_num_layers, layers);
  if (t.cpu_offloading_num_layers >= layers)
    shrinker.set("--cpu-offloading-num-layers", t.cpu_offloading_num_layers, layers - 1);
}

void shrink_rounding(TransformerConfig& t, Shrinker& shrinker) {
  t.init_method_std = 0.2;
  if (t.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear)
    t.cross_entropy_chunk_tokens = 5;  // so that there are several chunks
  if (!t.is_quantized()) return;
  shrinker.note(t.fp8_format != Fp8Format::kNone ? "--fp8-format off" : "--fp4-format off");
  t.remove_quantization();
}

}  // namespace megatron
