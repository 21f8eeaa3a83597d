#include "megatron/interop/huggingface/detail/hf_common.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "megatron/base/check.h"

namespace megatron::hf {
namespace {

// Names of activations; the first one of each kind is the one written.
constexpr std::pair<std::string_view, Activation> kPlainActivations[] = {
    {"gelu", Activation::kGelu},         {"gelu_pytorch_tanh", Activation::kGeluTanh},
    {"gelu_new", Activation::kGeluTanh}, {"gelu_fast", Activation::kGeluTanh},
    {"relu", Activation::kRelu},         {"relu2", Activation::kSquaredRelu}};

}  // namespace

double rounded(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*g", digits, value);
  return std::stod(text);
}

void rms_norm_gated(TransformerConfig& t) {
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.add_bias_linear = false;
  t.swiglu = true;
  t.hidden_dropout = 0.0;
}

void layers(HfFields& f, std::string_view key, TransformerConfig& t) {
  constexpr int64_t kMost = 10000;  // bounds memory: a layer is an object
  f.integer(key, t.num_layers);
  MEGATRON_CHECK(t.num_layers > 0 && t.num_layers <= kMost, f.name(), ": ", key, " is ",
                 t.num_layers, ", expected 1 to ", kMost);
}

void query_groups(HfFields& f, TransformerConfig& t, std::optional<int64_t> missing) {
  int64_t groups = t.query_groups();
  f.integer("num_key_value_heads", groups, missing.value_or(t.num_attention_heads));
  t.num_query_groups = groups;
  t.group_query_attention = groups != t.num_attention_heads;
}

void head_dim(HfFields& f, TransformerConfig& t, bool always, std::optional<int64_t> missing) {
  if (!f.reading() && !always && t.kv_channels == t.hidden_size / t.num_attention_heads)
    return f.erase("head_dim");
  f.integer("head_dim", t.kv_channels,
            missing.value_or(t.hidden_size / std::max<int64_t>(1, t.num_attention_heads)));
}

void linear_biases(HfFields& f, TransformerConfig& t) {
  bool attention_bias = t.add_bias_linear, mlp_bias = t.add_bias_linear;
  f.flag("attention_bias", attention_bias, false);
  f.flag("mlp_bias", mlp_bias, false);
  MEGATRON_CHECK(attention_bias == mlp_bias, f.name(),
                 ": attention_bias without mlp_bias, or the reverse, is not built");
  t.add_bias_linear = attention_bias;
}

void tied(HfFields& f, TransformerConfig& t, bool missing) {
  bool is_tied = !t.untie_embeddings_and_output_weights;
  f.flag("tie_word_embeddings", is_tied, missing);
  t.untie_embeddings_and_output_weights = !is_tied;
}

void plain_activation(HfFields& f, TransformerConfig& t, std::string_view key,
                      const char* missing) {
  std::string name = missing;
  if (!f.reading()) {
    const auto is = [&](std::string_view word) {
      return std::any_of(
          std::begin(kPlainActivations), std::end(kPlainActivations),
          [&](const auto& row) { return row.first == word && row.second == t.activation(); });
    };
    for (auto row = std::rbegin(kPlainActivations);
         row != std::rend(kPlainActivations) && !is(missing); ++row)
      if (row->second == t.activation()) name = row->first;
  }
  f.text(key, name, missing);
  if (!f.reading()) return;
  const auto* row = std::find_if(std::begin(kPlainActivations), std::end(kPlainActivations),
                                 [&](const auto& candidate) { return candidate.first == name; });
  MEGATRON_CHECK(row != std::end(kPlainActivations), f.name(), ": ", key, " \"", name,
                 "\" is not built");
  t.bias_gelu_fusion = false;
  t.openai_gelu = row->second == Activation::kGeluTanh;
  t.relu = row->second == Activation::kRelu;
  t.squared_relu = row->second == Activation::kSquaredRelu;
}

void set_windows(const std::string& name, TransformerConfig& t, std::optional<int64_t> width,
                 const std::vector<bool>& windowed) {
  const bool any = std::find(windowed.begin(), windowed.end(), true) != windowed.end();
  t.window_size.clear();
  t.window_attn_skip_freq.clear();
  if (!width || !any) return;
  MEGATRON_CHECK(*width > 0, name, ": a sliding_window of ", *width,
                 " tokens does not include the token itself");
  t.window_size = {*width - 1, 0};
  const auto n = static_cast<int64_t>(windowed.size());
  for (int64_t every = 2; every <= n + 1; ++every) {
    bool fits = true;
    for (int64_t i = 0; i < n; ++i)
      fits &= windowed[static_cast<size_t>(i)] == ((i + 1) % every != 0);
    if (!fits) continue;
    if (every <= n) t.window_attn_skip_freq = std::to_string(every);
    return;
  }
  for (const bool layer : windowed)
    t.window_attn_skip_freq += cat(t.window_attn_skip_freq.empty() ? "[" : ",", layer ? 1 : 0);
  t.window_attn_skip_freq += "]";
}

void one_window(HfFields& f, TransformerConfig& t, std::optional<int64_t> missing) {
  std::optional<int64_t> width;
  if (!t.window_size.empty() && t.window_attn_skip_freq.empty()) width = t.window_size[0] + 1;
  f.integer_or_null("sliding_window", width, missing);
  if (f.reading())
    set_windows(f.name(), t, width, std::vector<bool>(static_cast<size_t>(t.num_layers), true));
}

void layer_windows(HfFields& f, TransformerConfig& t, std::optional<int64_t> width,
                   const std::function<bool(int64_t layer)>& is_windowed) {
  std::vector<std::string> types;
  if (!f.reading()) {
    for (int64_t i = 1; i <= t.num_layers; ++i)
      types.push_back(t.window(i).empty() ? "full_attention" : "sliding_attention");
    return f.layer_types(types);
  }
  f.layer_types(types);
  std::vector<bool> windowed;
  for (int64_t i = 0; i < t.num_layers; ++i) windowed.push_back(is_windowed(i));
  if (!types.empty()) {
    MEGATRON_CHECK(static_cast<int64_t>(types.size()) == t.num_layers, f.name(),
                   ": layer_types names ", types.size(), " layers, num_hidden_layers is ",
                   t.num_layers);
    for (size_t i = 0; i < types.size(); ++i) {
      MEGATRON_CHECK(types[i] == "sliding_attention" || types[i] == "full_attention", f.name(),
                     ": layers of the type \"", types[i], "\" are not built");
      windowed[i] = types[i] == "sliding_attention";
    }
  }
  set_windows(f.name(), t, width, windowed);
}

std::optional<int64_t> window_width(const TransformerConfig& t) {
  if (t.window_size.empty()) return std::nullopt;
  return t.window_size[0] + 1;
}

void sizes(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size);
  f.integer("hidden_size", t.hidden_size);
  f.integer("intermediate_size", t.ffn_hidden_size);
  layers(f, "num_hidden_layers", t);
  f.integer("num_attention_heads", t.num_attention_heads);
}

void common(HfFields& f, ModelConfig& c, const CommonDefaults& missing) {
  TransformerConfig& t = c.transformer;
  sizes(f, c);
  query_groups(f, t, missing.groups);
  f.integer("max_position_embeddings", t.max_position_embeddings, missing.max_positions);
  f.number("rms_norm_eps", t.layernorm_epsilon, missing.norm_eps);
  f.number("initializer_range", t.init_method_std, 0.02);
  f.number("attention_dropout", t.attention_dropout, 0.0);
  tied(f, t, missing.tied);
}

}  // namespace megatron::hf
