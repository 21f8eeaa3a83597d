#include "megatron/interop/torch_dist/torch_dist_names.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kDecoder = "decoder.layers.", kFurther = "mtp.layers.";
// The transformer layer inside a layer of multi-token prediction, and its older name.
constexpr std::string_view kInner = "transformer_layer.", kOldInner = "mtp_model_layer.";
// Theirs, ours.
constexpr std::string_view kTheirExperts = "mlp.experts.experts.", kOurExperts = "mlp.experts.";

// Either may be in a file where the other one is ours.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"input_layernorm.", "self_attention.linear_qkv.layer_norm_"},
    {"pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"},
    {"self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"},
    {"self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"},
};

// The names of convolutions with a bias, theirs and ours.
constexpr std::string_view kTheirConv = "mixer.conv1d.", kOurConv = "mixer.conv1d_";
constexpr std::string_view kParts[] = {"z",     "x",   "B",     "C",    "dt",
                                       "query", "key", "value", "beta", "alpha"};

// Removes the name of a part behind that of a weight or bias.
std::string take_part(std::string& text) {
  const size_t dot = text.rfind('.');
  if (dot == text.npos) return {};
  const std::string part = text.substr(dot + 1);
  const std::string_view before = std::string_view(text).substr(0, dot);
  const bool known = std::ranges::find(kParts, part) != std::end(kParts);
  if (!known || !(before.ends_with(".weight") || before.ends_with(".bias"))) return {};
  text.resize(dot);
  return part;
}

// Removes a number and the dot behind it from the text at `at`; nothing if there is none.
std::optional<int64_t> take_index(std::string& text, size_t at) {
  const size_t dot = text.find('.', at);
  const bool numbered = dot != std::string::npos && dot > at && dot < at + 7 &&
                        text.find_first_not_of("0123456789", at) == dot;
  if (!numbered) return std::nullopt;
  const int64_t index = std::stoll(text.substr(at, dot - at));
  text.erase(at, dot + 1 - at);
  return index;
}

// Removes "_w" or "_v" behind a weight or bias of a gated FC1: 0 or 1; else -1.
int take_half(std::string& text) {
  if (text.find("linear_fc1.") == std::string::npos) return -1;
  for (const int half : {0, 1})
    for (const char* word : {"weight", "bias"})
      if (text.ends_with(cat(word, half == 0 ? "_w" : "_v"))) {
        text.resize(text.size() - 2);
        return half;
      }
  return -1;
}

void replace_prefix(std::string& text, size_t at, std::string_view from, std::string_view to) {
  if (text.compare(at, from.size(), from) == 0) text.replace(at, from.size(), to);
}

}  // namespace

std::string TorchDistKey::ours(int64_t of_layer) const {
  return block.empty() ? name : cat(block, of_layer, ".", name);
}

TorchDistKey parse_torch_dist_key(const std::string& key) {
  TorchDistKey parsed;
  parsed.name = key;
  for (const std::string_view block : {kDecoder, kFurther})
    if (key.starts_with(block)) parsed.block = block;
  if (parsed.block.empty()) return parsed;
  std::string& rest = parsed.name;
  rest.erase(0, parsed.block.size());
  parsed.layer = take_index(rest, 0);
  replace_prefix(rest, 0, kOldInner, kInner);
  const size_t inner = rest.starts_with(kInner) ? kInner.size() : 0;
  if (rest.compare(inner, kTheirExperts.size(), kTheirExperts) == 0) {
    rest.replace(inner, kTheirExperts.size(), kOurExperts);
    parsed.expert = take_index(rest, inner + kOurExperts.size());
  }
  parsed.half = take_half(rest);
  parsed.part = take_part(rest);
  replace_prefix(rest, 0, kTheirConv, kOurConv);
  return parsed;
}

std::string our_name(const TorchDistKey& key, int64_t layer,
                     const std::function<bool(const std::string& name)>& is_ours) {
  std::string plain = key.ours(layer);
  if (key.block.empty() || is_ours(plain)) return plain;
  const size_t inner = key.name.starts_with(kInner) ? kInner.size() : 0;
  for (const auto& [first, second] : kAliases)
    for (const auto& [from, to] : {std::pair{first, second}, std::pair{second, first}}) {
      TorchDistKey other = key;
      replace_prefix(other.name, inner, from, to);
      if (std::string name = other.ours(layer); is_ours(name)) return name;
    }
  return plain;
}

std::vector<TorchDistRows> torch_dist_rows(std::string_view name, const TransformerConfig& c) {
  std::vector<TorchDistRows> rows;
  const auto add = [&](std::initializer_list<std::pair<std::string_view, int64_t>> parts) {
    int64_t first = 0;
    for (const auto& [part, count] : parts) {
      rows.push_back({part, first, count});
      first += count;
    }
  };
  const int64_t heads = c.has_letter('M') ? c.mamba_width(c) : 0, states = c.mamba_states(),
                keys = c.linear_key_width(), values = c.linear_value_width();
  if (name.ends_with(".mixer.in_proj.weight"))
    add({{"z", heads}, {"x", heads}, {"B", states}, {"C", states}, {"dt", c.mamba_heads(c)}});
  if (name.ends_with(".mixer.conv1d_weight") || name.ends_with(".mixer.conv1d_bias"))
    add({{"x", heads}, {"B", states}, {"C", states}});
  if (name.ends_with(".self_attention.in_proj.weight"))
    add({{"query", keys},
         {"key", keys},
         {"value", values},
         {"z", values},
         {"beta", c.linear_num_value_heads},
         {"alpha", c.linear_num_value_heads}});
  if (name.ends_with(".self_attention.conv1d.weight"))
    add({{"query", keys}, {"key", keys}, {"value", values}});
  return rows;
}

TorchDistPlace torch_dist_place(const std::string& name, const TransformerConfig& config,
                                std::string_view part) {
  TorchDistKey parsed = parse_torch_dist_key(name);
  if (parsed.block.empty()) return {name, {}};
  const size_t inner = parsed.name.starts_with(kInner) ? kInner.size() : 0;
  replace_prefix(parsed.name, inner, kOurExperts, kTheirExperts);
  replace_prefix(parsed.name, inner, kOurConv, kTheirConv);
  if (!part.empty()) parsed.name += cat(".", part);
  // Layers are one tensor unless a list says which of them have experts.
  const bool alike = !config.is_hybrid() &&
                     (!config.has_moe() || config.moe_layer_freq == MoEConfig().moe_layer_freq);
  if (parsed.block == kDecoder && alike) return {parsed.block + parsed.name, parsed.layer};
  return {parsed.ours(*parsed.layer), {}};
}

bool is_stored_from_one(std::string_view name, const TransformerConfig& config) {
  return config.layernorm_zero_centered_gamma && name.ends_with(".self_attention.out_norm.weight");
}

std::vector<TorchDistState> torch_dist_states(const std::string& name,
                                              const TransformerConfig& config) {
  constexpr std::string_view kWeight = ".weight";
  if (!name.ends_with(kWeight)) return {};
  const TorchDistPlace place = torch_dist_place(name, config);
  std::string module = place.key.substr(0, place.key.size() - kWeight.size());
  const std::string_view last = std::string_view(module).substr(module.rfind('.') + 1);
  constexpr std::string_view kFurtherModules[] = {"eh_proj",  "fc1_latent_proj", "fc2_latent_proj",
                                                  "enorm",    "hnorm",           "in_proj",
                                                  "out_proj", "out_norm",        "final_norm"};
  const bool has_state = last.starts_with("linear_") || last.ends_with("layernorm") ||
                         std::find(std::begin(kFurtherModules), std::end(kFurtherModules), last) !=
                             std::end(kFurtherModules);
  if (!has_state) return {};
  TorchDistState state{module + "._extra_state", {}, {}};
  if (place.layer) {
    state.offset = {*place.layer};
    state.global_shape = {config.num_layers};
  }
  if (module.find(kTheirExperts) == std::string::npos) {
    if (!place.layer) state = {std::move(state.key), {0}, {1}};
    return {state};
  }
  std::vector<TorchDistState> states(static_cast<size_t>(config.num_experts), state);
  for (int64_t expert = 0; expert < config.num_experts; ++expert) {
    states[static_cast<size_t>(expert)].offset.push_back(expert);
    states[static_cast<size_t>(expert)].global_shape.push_back(config.num_experts);
  }
  return states;
}

}  // namespace megatron
