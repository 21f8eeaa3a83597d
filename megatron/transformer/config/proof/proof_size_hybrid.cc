// The tiny model of a pattern of letters.
#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {
namespace {

// The shortest text with the first and the last letter of `letters` and every pair of neighbours
// that it has: the shortest walk through the graph of the pairs.
std::string with_same_neighbours(const std::string& letters) {
  constexpr size_t kMostPairs = 16;
  if (letters.size() < 2) return letters;
  std::map<std::pair<char, char>, uint32_t> pairs;
  for (size_t i = 0; i + 1 < letters.size(); ++i)
    pairs.emplace(std::pair(letters[i], letters[i + 1]), 0);
  if (pairs.size() > kMostPairs) return letters;
  uint32_t bit = 1;
  for (auto& [pair, place] : pairs) place = std::exchange(bit, bit << 1);
  const uint32_t all = bit - 1;
  using Place = std::pair<char, uint32_t>;  // the last letter, and the pairs so far
  std::map<Place, std::string> texts = {{{letters[0], 0}, letters.substr(0, 1)}};
  for (std::deque<Place> open = {{letters[0], 0}}; !open.empty(); open.pop_front()) {
    const Place at = open.front();
    if (at == Place(letters.back(), all)) return texts.at(at);
    for (const auto& [pair, place] : pairs) {
      if (pair.first != at.first) continue;
      const Place next(pair.second, at.second | place);
      if (texts.emplace(next, texts.at(at) + pair.second).second) open.push_back(next);
    }
  }
  return letters;
}

struct MambaHeads {
  int64_t heads, groups;
};

// Numbers of which code can tell only one from several.
std::vector<std::pair<const char*, int64_t>> mamba_traits(const MambaHeads& h, int64_t tensor) {
  return {{"Mamba heads per tensor rank", h.heads / tensor},
          {"Mamba groups per tensor rank", std::max<int64_t>(1, h.groups / tensor)},
          {"tensor ranks per Mamba group", std::max<int64_t>(1, tensor / h.groups)},
          {"Mamba groups", h.groups},
          {"heads per Mamba group", h.heads / h.groups}};
}

// The fewest heads with the traits of the model, or with as many of them as there can be.
MambaHeads tiny_mamba_heads(const MambaHeads& model, int64_t before, int64_t tensor) {
  const auto wanted = mamba_traits(model, before);
  using Cost = std::tuple<int, int, int64_t>;  // traits lost, traits changed, heads
  std::optional<std::pair<Cost, MambaHeads>> best;
  for (int64_t heads = tensor; heads <= 8 * tensor; heads += tensor)
    for (int64_t groups = 1; groups <= heads; ++groups) {
      if (heads % groups != 0 || (groups % tensor != 0 && tensor % groups != 0)) continue;
      const auto found = mamba_traits({heads, groups}, tensor);
      Cost cost{0, 0, heads};
      for (size_t i = 0; i < wanted.size(); ++i) {
        const int64_t had = one_or_several(wanted[i].second), has = one_or_several(found[i].second);
        std::get<0>(cost) += has < had;
        std::get<1>(cost) += has != had;
      }
      if (!best || cost < best->first) best = {cost, {heads, groups}};
    }
  return best->second;
}

// Whether something else than its letter tells one layer from another.
bool layers_differ_otherwise(const TransformerConfig& t) {
  return t.cp_comm_type.size() > 1 || !t.window_attn_skip_freq.empty() || t.first_last_layers_bf16;
}

}  // namespace

void shrink_mamba(TransformerConfig& t, int64_t tensor_before, int64_t tensor, Shrinker& shrinker) {
  const MambaHeads model{t.mamba_heads(t), t.mamba_num_groups};
  const MambaHeads tiny = tiny_mamba_heads(model, tensor_before, tensor);
  const auto wanted = mamba_traits(model, tensor_before), found = mamba_traits(tiny, tensor);
  for (size_t i = 0; i < wanted.size(); ++i)
    shrinker.keep_several(wanted[i].first, wanted[i].second, found[i].second);
  // Quantised products have whole tiles of rows: those of the heads' steps, too.
  const int64_t tile = product_tile(t);
  shrinker.set("--mamba-num-heads", t.mamba_num_heads, tiny.heads * tile);
  shrinker.set("--mamba-num-groups", t.mamba_num_groups, tiny.groups);
  shrinker.set("--mamba-chunk-size", t.mamba_chunk_size, int64_t{3});  // several, and a shorter one
  shrinker.set("--mamba-head-dim", t.mamba_head_dim, int64_t{4});
  shrinker.set("--mamba-state-dim", t.mamba_state_dim,
               tile > 1 ? tile * tensor : 3 * std::max<int64_t>(1, tensor / tiny.groups));
}

void shrink_gated_delta(TransformerConfig& t, int64_t tensor_before, int64_t tensor,
                        Shrinker& shrinker) {
  const int64_t tile = product_tile(t), of_rank = t.linear_num_key_heads / tensor_before,
                of_key = t.linear_num_value_heads / t.linear_num_key_heads;
  const int64_t keys = tensor * one_or_several(of_rank) * tile;
  shrinker.set("--linear-num-key-heads", t.linear_num_key_heads, keys);
  shrinker.set("--linear-num-value-heads", t.linear_num_value_heads, keys * one_or_several(of_key));
  shrinker.set("--linear-key-head-dim", t.linear_key_head_dim, int64_t{4});
  shrinker.set("--linear-value-head-dim", t.linear_value_head_dim, int64_t{6});
  // Several, and a shorter one.
  shrinker.set("--linear-chunk-size", t.linear_chunk_size, int64_t{3});
}

void shrink_pattern(TransformerConfig& t, const std::vector<int64_t>& segments,
                    Shrinker& shrinker) {
  const std::string letters = t.hybrid_letters(), before = t.hybrid_layer_pattern;
  std::string fewer;
  std::vector<int64_t> counts;
  int64_t next = 0, longest_before = 0, longest = 0, shortest = t.num_layers;
  for (const int64_t count : segments) {
    const std::string segment =
        letters.substr(static_cast<size_t>(next), static_cast<size_t>(count));
    const std::string tiny = layers_differ_otherwise(t) ? segment : with_same_neighbours(segment);
    fewer += tiny;
    counts.push_back(std::ssize(tiny));
    next += count;
    longest_before = std::max(longest_before, count);
    longest = std::max(longest, counts.back());
    if (!tiny.empty()) shortest = std::min(shortest, counts.back());
  }
  t.hybrid_layer_pattern = pattern_of_segments(fewer, counts);
  if (t.hybrid_layer_pattern != before)
    shrinker.note(cat("--hybrid-layer-pattern ", before, " -> ", t.hybrid_layer_pattern));
  t.moe_layer_freq = MoEConfig().moe_layer_freq;  // finalize() derives it
  if (fewer == letters) return;
  t.num_layers = std::ssize(fewer);
  // Of each segment's layers all, or not all.
  const auto part = [&](int64_t layers) {
    return layers >= longest_before ? longest
                                    : std::min(layers, std::max<int64_t>(1, shortest - 1));
  };
  if (t.recompute_num_layers > 0)
    shrinker.set("--recompute-num-layers", t.recompute_num_layers, part(t.recompute_num_layers));
  shrinker.set("--cpu-offloading-num-layers", t.cpu_offloading_num_layers,
               std::min(t.cpu_offloading_num_layers == 0 ? 0 : part(t.cpu_offloading_num_layers),
                        t.num_layers - 1));
}

}  // namespace megatron
