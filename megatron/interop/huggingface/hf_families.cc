#include "megatron/interop/huggingface/hf_families.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

using Rope = HfFields::Rope;

// -- names

const HfRow kHead[] = {{"output_layer.weight", {"lm_head.weight"}}};

const HfRow kLlamaBody[] = {
    {"embedding.word_embeddings.weight", {"model.embed_tokens.weight"}},
    {"decoder.layers.*.self_attention.linear_proj.weight",
     {"model.layers.*.self_attn.o_proj.weight"}},
    {"decoder.layers.*.mlp.linear_fc2.weight", {"model.layers.*.mlp.down_proj.weight"}},
    {"decoder.final_layernorm.weight", {"model.norm.weight"}}};

const HfRow kSeparateWeights[] = {
    {"decoder.layers.*.self_attention.linear_qkv.weight",
     {"model.layers.*.self_attn.q_proj.weight", "model.layers.*.self_attn.k_proj.weight",
      "model.layers.*.self_attn.v_proj.weight"},
     HfLayout::kSeparateQKV}};

const HfRow kGateUp[] = {
    {"decoder.layers.*.mlp.linear_fc1.weight",
     {"model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"},
     HfLayout::kStacked}};

const HfRow kPreNorms[] = {{"decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
                            {"model.layers.*.input_layernorm.weight"}},
                           {"decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
                            {"model.layers.*.post_attention_layernorm.weight"}}};

const HfRow kSeparateBiases[] = {
    {"decoder.layers.*.self_attention.linear_qkv.bias",
     {"model.layers.*.self_attn.q_proj.bias", "model.layers.*.self_attn.k_proj.bias",
      "model.layers.*.self_attn.v_proj.bias"},
     HfLayout::kSeparateQKV}};

const HfRow kLlamaBiases[] = {
    {"decoder.layers.*.self_attention.linear_proj.bias", {"model.layers.*.self_attn.o_proj.bias"}},
    {"decoder.layers.*.mlp.linear_fc1.bias",
     {"model.layers.*.mlp.gate_proj.bias", "model.layers.*.mlp.up_proj.bias"},
     HfLayout::kStacked},
    {"decoder.layers.*.mlp.linear_fc2.bias", {"model.layers.*.mlp.down_proj.bias"}}};

const HfRow kQKNorms[] = {{"decoder.layers.*.self_attention.q_layernorm.weight",
                           {"model.layers.*.self_attn.q_norm.weight"}},
                          {"decoder.layers.*.self_attention.k_layernorm.weight",
                           {"model.layers.*.self_attn.k_norm.weight"}}};

const HfRow kSandwichNorms[] = {{"decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
                                 {"model.layers.*.input_layernorm.weight"}},
                                {"decoder.layers.*.post_self_attn_layernorm.weight",
                                 {"model.layers.*.post_attention_layernorm.weight"}},
                                {"decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
                                 {"model.layers.*.pre_feedforward_layernorm.weight"}},
                                {"decoder.layers.*.post_mlp_layernorm.weight",
                                 {"model.layers.*.post_feedforward_layernorm.weight"}}};

const HfRow kPostNorms[] = {{"decoder.layers.*.post_self_attn_layernorm.weight",
                             {"model.layers.*.post_attention_layernorm.weight"}},
                            {"decoder.layers.*.post_mlp_layernorm.weight",
                             {"model.layers.*.post_feedforward_layernorm.weight"}}};

const HfRow kPhi3Joined[] = {
    {"decoder.layers.*.self_attention.linear_qkv.weight",
     {"model.layers.*.self_attn.qkv_proj.weight"},
     HfLayout::kJoinedQKV},
    {"decoder.layers.*.mlp.linear_fc1.weight", {"model.layers.*.mlp.gate_up_proj.weight"}}};

const HfRow kStarcoder2[] = {
    {"decoder.layers.*.self_attention.linear_qkv.layer_norm_bias",
     {"model.layers.*.input_layernorm.bias"}},
    {"decoder.layers.*.self_attention.linear_proj.bias", {"model.layers.*.self_attn.o_proj.bias"}},
    {"decoder.layers.*.mlp.linear_fc1.layer_norm_bias",
     {"model.layers.*.post_attention_layernorm.bias"}},
    {"decoder.layers.*.mlp.linear_fc1.weight", {"model.layers.*.mlp.c_fc.weight"}},
    {"decoder.layers.*.mlp.linear_fc1.bias", {"model.layers.*.mlp.c_fc.bias"}},
    {"decoder.layers.*.mlp.linear_fc2.weight", {"model.layers.*.mlp.c_proj.weight"}},
    {"decoder.layers.*.mlp.linear_fc2.bias", {"model.layers.*.mlp.c_proj.bias"}},
    {"decoder.final_layernorm.bias", {"model.norm.bias"}}};

const HfRow kStarcoder2Body[] = {
    {"embedding.word_embeddings.weight", {"model.embed_tokens.weight"}},
    {"decoder.layers.*.self_attention.linear_proj.weight",
     {"model.layers.*.self_attn.o_proj.weight"}},
    {"decoder.final_layernorm.weight", {"model.norm.weight"}}};

// Linear layers of GPT-2 are Conv1D modules, whose weights are [inputs, outputs].
const HfRow kGpt2[] = {
    {"embedding.word_embeddings.weight", {"transformer.wte.weight"}},
    {"embedding.position_embeddings.weight", {"transformer.wpe.weight"}},
    {"decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
     {"transformer.h.*.ln_1.weight"}},
    {"decoder.layers.*.self_attention.linear_qkv.layer_norm_bias", {"transformer.h.*.ln_1.bias"}},
    {"decoder.layers.*.self_attention.linear_qkv.weight",
     {"transformer.h.*.attn.c_attn.weight"},
     HfLayout::kJoinedQKV,
     true},
    {"decoder.layers.*.self_attention.linear_qkv.bias",
     {"transformer.h.*.attn.c_attn.bias"},
     HfLayout::kJoinedQKV},
    {"decoder.layers.*.self_attention.linear_proj.weight",
     {"transformer.h.*.attn.c_proj.weight"},
     HfLayout::kSame,
     true},
    {"decoder.layers.*.self_attention.linear_proj.bias", {"transformer.h.*.attn.c_proj.bias"}},
    {"decoder.layers.*.mlp.linear_fc1.layer_norm_weight", {"transformer.h.*.ln_2.weight"}},
    {"decoder.layers.*.mlp.linear_fc1.layer_norm_bias", {"transformer.h.*.ln_2.bias"}},
    {"decoder.layers.*.mlp.linear_fc1.weight",
     {"transformer.h.*.mlp.c_fc.weight"},
     HfLayout::kSame,
     true},
    {"decoder.layers.*.mlp.linear_fc1.bias", {"transformer.h.*.mlp.c_fc.bias"}},
    {"decoder.layers.*.mlp.linear_fc2.weight",
     {"transformer.h.*.mlp.c_proj.weight"},
     HfLayout::kSame,
     true},
    {"decoder.layers.*.mlp.linear_fc2.bias", {"transformer.h.*.mlp.c_proj.bias"}},
    {"decoder.final_layernorm.weight", {"transformer.ln_f.weight"}},
    {"decoder.final_layernorm.bias", {"transformer.ln_f.bias"}}};

// Rows of query_key_value are [query | key | value] per head, as ours are without query groups.
const HfRow kGptNeoX[] = {
    {"embedding.word_embeddings.weight", {"gpt_neox.embed_in.weight"}},
    {"decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
     {"gpt_neox.layers.*.input_layernorm.weight"}},
    {"decoder.layers.*.self_attention.linear_qkv.layer_norm_bias",
     {"gpt_neox.layers.*.input_layernorm.bias"}},
    {"decoder.layers.*.self_attention.linear_qkv.weight",
     {"gpt_neox.layers.*.attention.query_key_value.weight"}},
    {"decoder.layers.*.self_attention.linear_qkv.bias",
     {"gpt_neox.layers.*.attention.query_key_value.bias"}},
    {"decoder.layers.*.self_attention.linear_proj.weight",
     {"gpt_neox.layers.*.attention.dense.weight"}},
    {"decoder.layers.*.self_attention.linear_proj.bias",
     {"gpt_neox.layers.*.attention.dense.bias"}},
    {"decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
     {"gpt_neox.layers.*.post_attention_layernorm.weight"}},
    {"decoder.layers.*.mlp.linear_fc1.layer_norm_bias",
     {"gpt_neox.layers.*.post_attention_layernorm.bias"}},
    {"decoder.layers.*.mlp.linear_fc1.weight", {"gpt_neox.layers.*.mlp.dense_h_to_4h.weight"}},
    {"decoder.layers.*.mlp.linear_fc1.bias", {"gpt_neox.layers.*.mlp.dense_h_to_4h.bias"}},
    {"decoder.layers.*.mlp.linear_fc2.weight", {"gpt_neox.layers.*.mlp.dense_4h_to_h.weight"}},
    {"decoder.layers.*.mlp.linear_fc2.bias", {"gpt_neox.layers.*.mlp.dense_4h_to_h.bias"}},
    {"decoder.final_layernorm.weight", {"gpt_neox.final_layer_norm.weight"}},
    {"decoder.final_layernorm.bias", {"gpt_neox.final_layer_norm.bias"}},
    {"output_layer.weight", {"embed_out.weight"}}};

// -- what families have in common

void rms_norm_gated(TransformerConfig& t) {
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.add_bias_linear = false;
  t.swiglu = true;
  t.hidden_dropout = 0.0;
}

void gemma_preset(TransformerConfig& t) {
  rms_norm_gated(t);
  t.swiglu = false;
  t.geglu = true;
  t.layernorm_zero_centered_gamma = true;
  t.norm_placement = NormPlacement::kSandwich;
  t.scale_embeddings = true;
}

// -- keys that several families share

void layers(HfFields& f, std::string_view key, TransformerConfig& t) {
  constexpr int64_t kMost = 10000;  // bounds memory: a layer is an object
  f.integer(key, t.num_layers);
  MEGATRON_CHECK(t.num_layers > 0 && t.num_layers <= kMost, f.name(), ": ", key, " is ",
                 t.num_layers, ", expected 1 to ", kMost);
}

void query_groups(HfFields& f, TransformerConfig& t, std::optional<int64_t> missing = {}) {
  int64_t groups = t.query_groups();
  f.integer("num_key_value_heads", groups, missing.value_or(t.num_attention_heads));
  t.num_query_groups = groups;
  t.group_query_attention = groups != t.num_attention_heads;
}

// Default: hidden_size / num_attention_heads. Not written if it equals the default, unless
// `always`.
void head_dim(HfFields& f, TransformerConfig& t, bool always = true,
              std::optional<int64_t> missing = {}) {
  if (!f.reading() && !always && t.kv_channels == t.hidden_size / t.num_attention_heads)
    return f.erase("head_dim");
  f.integer("head_dim", t.kv_channels,
            missing.value_or(t.hidden_size / std::max<int64_t>(1, t.num_attention_heads)));
}

void tied(HfFields& f, TransformerConfig& t, bool missing) {
  bool is_tied = !t.untie_embeddings_and_output_weights;
  f.flag("tie_word_embeddings", is_tied, missing);
  t.untie_embeddings_and_output_weights = !is_tied;
}

// Names of activations; the first one of each kind is the one written.
constexpr std::pair<std::string_view, Activation> kPlainActivations[] = {
    {"gelu", Activation::kGelu},
    {"gelu_pytorch_tanh", Activation::kGeluTanh},
    {"gelu_new", Activation::kGeluTanh},
    {"gelu_fast", Activation::kGeluTanh},
    {"relu2", Activation::kSquaredRelu}};

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
  t.squared_relu = row->second == Activation::kSquaredRelu;
}

// In `windowed` layers a token attends to the last `width` tokens, itself included.
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

// sliding_window, the same for all layers, or null.
void one_window(HfFields& f, TransformerConfig& t, std::optional<int64_t> missing) {
  std::optional<int64_t> width;
  if (!t.window_size.empty() && t.window_attn_skip_freq.empty()) width = t.window_size[0] + 1;
  f.integer_or_null("sliding_window", width, missing);
  if (f.reading())
    set_windows(f.name(), t, width, std::vector<bool>(static_cast<size_t>(t.num_layers), true));
}

// layer_types; if that key is absent, `is_windowed(layer)`, layers from 0.
template <class IsWindowed>
void layer_windows(HfFields& f, TransformerConfig& t, std::optional<int64_t> width,
                   const IsWindowed& is_windowed) {
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

// Defaults of Llama and its descendants, without the rotary ones.
struct CommonDefaults {
  double norm_eps = 1e-6;
  bool tied = false;
  int64_t max_positions = 2048;
  std::optional<int64_t> groups = {};
};

void common(HfFields& f, ModelConfig& c, const CommonDefaults& missing) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size);
  f.integer("hidden_size", t.hidden_size);
  f.integer("intermediate_size", t.ffn_hidden_size);
  layers(f, "num_hidden_layers", t);
  f.integer("num_attention_heads", t.num_attention_heads);
  query_groups(f, t, missing.groups);
  f.integer("max_position_embeddings", t.max_position_embeddings, missing.max_positions);
  f.number("rms_norm_eps", t.layernorm_epsilon, missing.norm_eps);
  f.number("initializer_range", t.init_method_std, 0.02);
  f.number("attention_dropout", t.attention_dropout, 0.0);
  tied(f, t, missing.tied);
}

// -- families

void llama_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.norm_eps = 1e-6});
  head_dim(f, t);
  f.constant("hidden_act", "\"silu\"");
  bool attention_bias = t.add_bias_linear, mlp_bias = t.add_bias_linear;
  f.flag("attention_bias", attention_bias, false);
  f.flag("mlp_bias", mlp_bias, false);
  MEGATRON_CHECK(attention_bias == mlp_bias, f.name(),
                 ": attention_bias without mlp_bias, or the reverse, is not built");
  t.add_bias_linear = attention_bias;
  f.rope(t, {});
}

void mistral_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.max_positions = 4096 * 32, .groups = 8});
  head_dim(f, t);
  f.constant("hidden_act", "\"silu\"");
  one_window(f, t, 4096);
  f.rope(t, {});
}

void qwen_windows(HfFields& f, TransformerConfig& t) {
  bool use = !t.window_size.empty();
  f.flag("use_sliding_window", use, false);
  std::optional<int64_t> width = window_width(t);
  f.integer_or_null("sliding_window", width, 4096);
  int64_t first = t.num_layers;
  for (int64_t i = t.num_layers; i > 0 && !t.window(i).empty(); --i) first = i - 1;
  f.integer("max_window_layers", first, 28);
  if (!use) width.reset();
  layer_windows(f, t, width, [&](int64_t i) { return i >= first; });
}

void qwen2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.max_positions = 32768, .groups = 32});
  head_dim(f, t, /*always=*/false);
  f.constant("hidden_act", "\"silu\"");
  f.rope(t, {});
  qwen_windows(f, t);
}

void qwen3_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.max_positions = 32768, .groups = 32});
  head_dim(f, t, /*always=*/true, 128);
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  f.rope(t, {});
  qwen_windows(f, t);
}

void gpt2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size);
  f.integer("n_embd", t.hidden_size);
  layers(f, "n_layer", t);
  f.integer("n_head", t.num_attention_heads);
  f.integer("n_positions", t.max_position_embeddings, 1024);
  f.integer("n_inner", t.ffn_hidden_size, 4 * t.hidden_size);
  f.number("layer_norm_epsilon", t.layernorm_epsilon, 1e-5);
  f.number("initializer_range", t.init_method_std, 0.02);
  f.number("resid_pdrop", t.hidden_dropout, 0.1);
  f.number("attn_pdrop", t.attention_dropout, 0.1);
  if (!f.reading()) f.number("embd_pdrop", t.hidden_dropout);
  plain_activation(f, t, "activation_function", "gelu_new");
  f.constant("scale_attn_weights", "true");
  f.constant("scale_attn_by_inverse_layer_idx", "false");
  f.constant("add_cross_attention", "false");
  tied(f, t, true);
}

void gpt_neox_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size);
  f.integer("hidden_size", t.hidden_size);
  f.integer("intermediate_size", t.ffn_hidden_size);
  layers(f, "num_hidden_layers", t);
  f.integer("num_attention_heads", t.num_attention_heads);
  f.integer("max_position_embeddings", t.max_position_embeddings, 2048);
  f.number("layer_norm_eps", t.layernorm_epsilon, 1e-5);
  f.number("initializer_range", t.init_method_std, 0.02);
  f.number("hidden_dropout", t.hidden_dropout, 0.0);
  f.number("attention_dropout", t.attention_dropout, 0.0);
  plain_activation(f, t, "hidden_act", "gelu");
  f.flag("use_parallel_residual", t.parallel_residual, true);
  f.constant("attention_bias", "true");
  tied(f, t, false);
  f.rope(t, {.percent = 0.25, .legacy_theta = "rotary_emb_base", .legacy_percent = "rotary_pct"});
}

void phi3_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.norm_eps = 1e-5, .max_positions = 4096});
  f.constant("hidden_act", "\"silu\"");
  f.number("resid_pdrop", t.hidden_dropout, 0.0);
  if (!f.reading()) f.number("embd_pdrop", t.hidden_dropout);
  one_window(f, t, std::nullopt);
  head_dim(f, t, /*always=*/false);
  f.rope(t, {.original_length = 4096});
}

void gemma_common(HfFields& f, ModelConfig& c, double attention_cap, double final_cap) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.tied = true, .max_positions = 8192, .groups = 4});
  head_dim(f, t, /*always=*/true, 256);
  f.constant("hidden_activation", "\"gelu_pytorch_tanh\"");
  f.constant("attention_bias", "false");
  f.constant("use_bidirectional_attention", "false");
  double scalar = t.query_pre_attn_scalar.value_or(static_cast<double>(t.kv_channels));
  if (f.reading() || scalar != std::floor(scalar)) {
    f.number("query_pre_attn_scalar", scalar, 256.0);
  } else {
    auto whole = static_cast<int64_t>(scalar);
    f.integer("query_pre_attn_scalar", whole);  // transformers requires an integer here
  }
  t.query_pre_attn_scalar = scalar;
  f.number_or_null("attn_logit_softcapping", t.attn_logit_softcapping, attention_cap);
  f.number_or_null("final_logit_softcapping", t.final_logit_softcapping, final_cap);
}

void gemma2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  gemma_common(f, c, 50.0, 30.0);
  f.rope(t, {});
  std::optional<int64_t> width = window_width(t);
  f.integer_or_null("sliding_window", width, 4096);
  layer_windows(f, t, width, [](int64_t i) { return i % 2 == 0; });
}

void gemma3_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  gemma_common(f, c, 0.0, 0.0);
  f.rope(t, {.theta = 1000000, .local_theta = 10000});
  std::optional<int64_t> width = window_width(t);
  f.integer_or_null("sliding_window", width, 4096);
  const int64_t pattern = f.reading() ? f.find_integer("sliding_window_pattern").value_or(6) : 6;
  MEGATRON_CHECK(pattern > 0, f.name(), ": sliding_window_pattern ", pattern, " is not positive");
  if (!f.reading()) f.erase("sliding_window_pattern");
  layer_windows(f, t, width, [&](int64_t i) { return (i + 1) % pattern != 0; });
  if (t.window_size.empty()) t.rotary_base_local.reset();
}

void olmo2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.norm_eps = 1e-5});
  head_dim(f, t, /*always=*/false);
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  f.rope(t, {});
}

void starcoder2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size);
  f.integer("hidden_size", t.hidden_size);
  f.integer("intermediate_size", t.ffn_hidden_size);
  layers(f, "num_hidden_layers", t);
  f.integer("num_attention_heads", t.num_attention_heads);
  query_groups(f, t, 2);
  head_dim(f, t, /*always=*/false);
  f.integer("max_position_embeddings", t.max_position_embeddings, 4096);
  f.number("norm_epsilon", t.layernorm_epsilon, 1e-5);
  f.number("initializer_range", t.init_method_std, 0.018042);
  f.number("residual_dropout", t.hidden_dropout, 0.0);
  f.number("attention_dropout", t.attention_dropout, 0.0);
  if (!f.reading()) f.number("embedding_dropout", t.hidden_dropout);
  plain_activation(f, t, "hidden_act", "gelu_pytorch_tanh");
  f.flag("use_bias", t.add_bias_linear, true);
  one_window(f, t, std::nullopt);
  tied(f, t, true);
  f.rope(t, {});
}

const std::vector<std::string_view> kFrequencies = {"model.layers.*.self_attn.rotary_emb.inv_freq"};

const std::vector<HfFamily>& families() {
  static const std::vector<HfFamily> table = {
      {"llama",
       "LlamaForCausalLM",
       "model.",
       {kLlamaBody, kSeparateWeights, kSeparateBiases, kLlamaBiases, kGateUp, kPreNorms, kHead},
       {},
       kFrequencies,
       rms_norm_gated,
       llama_fields},
      {"mistral",
       "MistralForCausalLM",
       "model.",
       {kLlamaBody, kSeparateWeights, kGateUp, kPreNorms, kHead},
       {},
       kFrequencies,
       rms_norm_gated,
       mistral_fields},
      {"qwen2",
       "Qwen2ForCausalLM",
       "model.",
       {kLlamaBody, kSeparateWeights, kSeparateBiases, kGateUp, kPreNorms, kHead},
       {},
       kFrequencies,
       [](TransformerConfig& t) {
         rms_norm_gated(t);
         t.add_qkv_bias = true;
       },
       qwen2_fields},
      {"qwen3",
       "Qwen3ForCausalLM",
       "model.",
       {kLlamaBody, kSeparateWeights, kQKNorms, kGateUp, kPreNorms, kHead},
       {},
       kFrequencies,
       [](TransformerConfig& t) {
         rms_norm_gated(t);
         t.qk_layernorm = true;
       },
       qwen3_fields},
      {"gpt2",
       "GPT2LMHeadModel",
       "transformer.",
       {kGpt2, kHead},
       {},
       {"transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"},
       [](TransformerConfig&) {},
       gpt2_fields},
      {"gpt_neox",
       "GPTNeoXForCausalLM",
       "gpt_neox.",
       {kGptNeoX},
       {{"lm_head.weight", "embed_out.weight"}},
       {"gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias",
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq"},
       [](TransformerConfig& t) { t.position_embedding_type = PositionEmbedding::kRope; },
       gpt_neox_fields},
      {"phi3",
       "Phi3ForCausalLM",
       "model.",
       {kLlamaBody, kPhi3Joined, kPreNorms, kHead},
       {},
       kFrequencies,
       rms_norm_gated,
       phi3_fields},
      {"gemma2",
       "Gemma2ForCausalLM",
       "model.",
       {kLlamaBody, kSeparateWeights, kGateUp, kSandwichNorms, kHead},
       {},
       kFrequencies,
       gemma_preset,
       gemma2_fields},
      {"gemma3_text",
       "Gemma3ForCausalLM",
       "model.",
       {kLlamaBody, kSeparateWeights, kQKNorms, kGateUp, kSandwichNorms, kHead},
       {},
       kFrequencies,
       [](TransformerConfig& t) {
         gemma_preset(t);
         t.qk_layernorm = true;
       },
       gemma3_fields},
      {"olmo2",
       "Olmo2ForCausalLM",
       "model.",
       {kLlamaBody, kSeparateWeights, kQKNorms, kGateUp, kPostNorms, kHead},
       {},
       kFrequencies,
       [](TransformerConfig& t) {
         rms_norm_gated(t);
         t.norm_placement = NormPlacement::kPost;
         t.qk_layernorm = t.qk_layernorm_over_heads = true;
       },
       olmo2_fields},
      {"starcoder2",
       "Starcoder2ForCausalLM",
       "model.",
       {kStarcoder2Body, kStarcoder2, kSeparateWeights, kSeparateBiases, kPreNorms, kHead},
       {},
       kFrequencies,
       [](TransformerConfig& t) { t.position_embedding_type = PositionEmbedding::kRope; },
       starcoder2_fields},
  };
  return table;
}

}  // namespace

std::optional<std::vector<int64_t>> indices_of(std::string_view pattern, std::string_view name) {
  std::vector<int64_t> indices;
  size_t at = 0;
  for (const char c : pattern) {
    if (c != '*') {
      if (at == name.size() || name[at++] != c) return std::nullopt;
      continue;
    }
    constexpr size_t kMostDigits = 9;
    const size_t end = std::min(name.find_first_not_of("0123456789", at), name.size());
    if (end == at || end - at > kMostDigits) return std::nullopt;
    indices.push_back(std::stoll(std::string(name.substr(at, end - at))));
    at = end;
  }
  if (at != name.size()) return std::nullopt;
  return indices;
}

std::string with_indices(std::string_view pattern, std::span<const int64_t> indices) {
  std::string name;
  size_t next = 0;
  for (const char c : pattern) {
    if (c != '*') {
      name += c;
      continue;
    }
    MEGATRON_ASSERT(next < indices.size(), pattern, " has more than ", indices.size(), " indices");
    name += std::to_string(indices[next++]);
  }
  return name;
}

std::vector<RowRun> row_runs(HfLayout layout, size_t part, int64_t rows,
                             const TransformerConfig& t) {
  const int64_t d = t.kv_channels, groups = t.query_groups(), r = t.num_attention_heads / groups;
  std::vector<RowRun> runs;
  const auto queries = [&](int64_t from) {
    for (int64_t g = 0; g < groups; ++g) runs.push_back({from + g * r * d, g * (r + 2) * d, r * d});
  };
  const auto keys_or_values = [&](int64_t from, int64_t which) {
    for (int64_t g = 0; g < groups; ++g)
      runs.push_back({from + g * d, (g * (r + 2) + r + which) * d, d});
  };
  switch (layout) {
    case HfLayout::kSame:
      return {{0, 0, rows}};
    case HfLayout::kStacked:
      return {{0, static_cast<int64_t>(part) * rows, rows}};
    case HfLayout::kSeparateQKV:
      part == 0 ? queries(0) : keys_or_values(0, static_cast<int64_t>(part) - 1);
      return runs;
    case HfLayout::kJoinedQKV:
      queries(0);
      keys_or_values(groups * r * d, 0);
      keys_or_values(groups * (r + 1) * d, 1);
      return runs;
  }
  return runs;
}

int64_t rows_of_part(HfLayout layout, size_t part, size_t parts, int64_t rows,
                     const TransformerConfig& t) {
  if (layout == HfLayout::kStacked) return rows / static_cast<int64_t>(parts);
  if (layout != HfLayout::kSeparateQKV) return rows;
  return (part == 0 ? t.num_attention_heads : t.query_groups()) * t.kv_channels;
}

TensorView view_of(const HfTensor& tensor) {
  if (tensor.transposed) return {0, tensor.shape[1], tensor.shape[0], 1, tensor.shape[1]};
  int64_t columns = 1;
  for (size_t d = 1; d < tensor.shape.size(); ++d) columns *= tensor.shape[d];
  return {0, tensor.shape[0], columns, columns, 1};
}

ShardedTensor part_of_ours(const HfTensor& tensor, DType dtype) {
  ShardedTensor part;
  part.key = tensor.ours;
  part.dtype = dtype;
  part.global_shape = tensor.our_shape;
  part.local_shape = tensor.shape;
  if (tensor.transposed) std::swap(part.local_shape[0], part.local_shape[1]);
  const size_t rows = tensor.expert >= 0 ? 1 : 0;  // the dimension
  if (rows > 0) part.local_shape.insert(part.local_shape.begin(), 1);
  for (const RowRun& run : tensor.runs) {
    ShardPiece piece;
    piece.global = {std::vector<int64_t>(tensor.our_shape.size(), 0), tensor.our_shape};
    piece.local_offset.assign(tensor.our_shape.size(), 0);
    if (rows > 0) {
      piece.global.offset[0] = tensor.expert;
      piece.global.shape[0] = 1;
    }
    piece.global.offset[rows] = run.ours;
    piece.global.shape[rows] = run.count;
    piece.local_offset[rows] = run.theirs;
    part.pieces.push_back(std::move(piece));
  }
  return part;
}

std::span<const HfFamily> hf_families() { return families(); }

const HfFamily* find_hf_family(std::string_view model_type) {
  for (const HfFamily& family : families())
    if (family.model_type == model_type) return &family;
  return nullptr;
}

std::string hf_family_names() {
  std::string names;
  for (const HfFamily& family : families())
    names += cat(names.empty() ? "" : ", ", family.model_type);
  return names;
}

namespace {

// The tensors of a parameter, or of one expert of it (-1: all), which has this shape.
void add_parts(const HfRow& row, const std::vector<int64_t>& indices, const std::string& name,
               const std::vector<int64_t>& our_shape, int64_t expert,
               const std::vector<int64_t>& shape, const TransformerConfig& t,
               std::vector<HfTensor>& tensors) {
  const size_t parts = row.theirs.size();
  for (size_t part = 0; part < parts; ++part) {
    HfTensor tensor;
    tensor.name = with_indices(row.theirs[part], indices);
    tensor.shape = shape;
    tensor.shape[0] = rows_of_part(row.layout, part, parts, shape[0], t);
    tensor.runs = row_runs(row.layout, part, tensor.shape[0], t);
    tensor.transposed = row.transposed;
    if (tensor.transposed) std::swap(tensor.shape[0], tensor.shape[1]);
    tensor.ours = name;
    tensor.our_shape = our_shape;
    tensor.expert = expert;
    tensors.push_back(std::move(tensor));
  }
}

}  // namespace

std::vector<HfTensor> hf_tensors(const HfFamily& family, const ModelConfig& config) {
  return hf_tensors(family, config.transformer, parameter_shapes(config));
}

std::vector<HfTensor> hf_tensors(const HfFamily& family, const TransformerConfig& config,
                                 const ParameterShapes& parameters) {
  std::vector<HfTensor> tensors;
  for (const auto& [name, shape] : parameters) {
    const HfRow* row = nullptr;
    std::vector<int64_t> indices;
    for (const std::span<const HfRow> rows : family.rows)
      for (const HfRow& candidate : rows)
        if (auto match = indices_of(candidate.ours, name)) {
          row = &candidate;
          indices = std::move(*match);
        }
    MEGATRON_CHECK(row != nullptr, "a ", family.model_type,
                   " model of Hugging Face has no tensor for ", name);
    const std::string_view theirs = row->theirs.front();
    if (std::count(theirs.begin(), theirs.end(), '*') <= std::ssize(indices)) {
      add_parts(*row, indices, name, shape, -1, shape, config, tensors);
      continue;
    }
    const std::vector<int64_t> of_expert(shape.begin() + 1, shape.end());
    indices.push_back(0);
    for (int64_t& expert = indices.back(); expert < shape[0]; ++expert)
      add_parts(*row, indices, name, shape, expert, of_expert, config, tensors);
  }
  return tensors;
}

HfModel parse_hf_config(const std::string& text, const std::string& name) {
  HfFields fields(text, name);
  std::string type;
  fields.text("model_type", type, "");
  MEGATRON_CHECK(
      !type.empty(), name, ": has no model_type",
      "\nhint: the config.json of a model names its type, such as \"llama\"; without one, "
      "convert-checkpoint --name-map reads the weights");
  MEGATRON_CHECK(fields.num_experts() == 0, name, ": is of a \"", type, "\" model with ",
                 fields.num_experts(), " experts per layer; mixture of experts is not built yet");
  const std::string quantization = fields.quantization_method();
  MEGATRON_CHECK(quantization.empty(), name, ": the weights are quantised by ", quantization,
                 " (quantization_config), which is not built yet",
                 "\nhint: give the model's weights as they were before, in bf16, fp16 or fp32");
  HfModel model;
  model.family = find_hf_family(type);
  MEGATRON_CHECK(model.family != nullptr, name, ": models of the type \"", type, "\" are not known",
                 "\nhint: types that are: ", hf_family_names(),
                 "; convert-checkpoint --name-map reads others whose blocks are ours");
  model.config.type = model.family->type;
  TransformerConfig& t = model.config.transformer;
  model.family->preset(t);
  model.family->fields(fields, model.config);
  t.seq_length = t.max_position_embeddings;
  MEGATRON_CHECK(model.config.vocab_size > 0, name, ": vocab_size ", model.config.vocab_size,
                 " is not positive");
  model.config.padded_vocab_size = model.config.vocab_size;
  t.finalize();
  Violations violations;
  t.validate(violations);
  MEGATRON_CHECK(violations.empty(), name, ": ", violations.messages().front());
  return model;
}

namespace {

// Position interpolation is linear RoPE scaling, and transformers calls it that.
void use_linear_scaling(TransformerConfig& t) {
  if (!t.rotary_seq_len_interpolation_factor || t.rope_scaling_type != RopeScaling::kNone) return;
  t.rope_scaling_type = RopeScaling::kLinear;
  t.rope_scaling_factor = static_cast<double>(*t.rotary_seq_len_interpolation_factor);
  t.rotary_seq_len_interpolation_factor.reset();
}

}  // namespace

std::string write_hf_config(const HfFamily& family, const ModelConfig& config,
                            const std::string& base) {
  HfFields fields = HfFields::writer(base);
  fields.set("architectures", cat("[\"", family.architecture, "\"]"));
  std::string type(family.model_type);
  fields.text("model_type", type);
  ModelConfig copy = config;
  use_linear_scaling(copy.transformer);
  family.fields(fields, copy);
  std::string text = fields.text();
  const HfModel back =
      parse_hf_config(text, cat("the configuration as a ", family.model_type, " model"));
  const std::string difference =
      architecture_difference(config.transformer, back.config.transformer);
  MEGATRON_CHECK(difference.empty(), "a ", family.model_type,
                 " model of Hugging Face cannot express this model: ", difference);
  return text;
}

namespace {

// Fields of the architecture by name, as text; those without effect have their defaults.
std::map<std::string, std::string> settings(const TransformerConfig& given) {
  TransformerConfig t = given;
  t.finalize();
  const TransformerConfig defaults;
  use_linear_scaling(t);
  t.num_query_groups = t.query_groups();
  t.group_query_attention = t.num_query_groups != t.num_attention_heads;
  t.use_rotary_position_embeddings = t.use_rope_scaling = false;
  t.add_position_embedding = true;
  t.openai_gelu = given.activation() == Activation::kGeluTanh;
  t.bias_gelu_fusion = false;
  t.add_qkv_bias = t.qkv_bias();
  if (!t.window_size.empty()) t.window_size[1] = 0;  // attention is causal
  if (t.window_size.empty()) t.rotary_base_local.reset();
  // Compare which layers are windowed, not how the list was written.
  std::string windows;
  for (int64_t i = 1; i <= t.num_layers; ++i) windows += t.window(i).empty() ? '0' : '1';
  t.window_attn_skip_freq = windows;
  t.query_pre_attn_scalar = t.query_pre_attn_scalar.value_or(static_cast<double>(t.kv_channels));
  if (t.position_embedding_type != PositionEmbedding::kRope) {
    t.rotary_base = defaults.rotary_base;
    t.rotary_percent = defaults.rotary_percent;
    t.rotary_interleaved = false;
  }
  // Derived factors get their values.
  const RopeScaling scaling = t.rope_scaling_type;
  if (scaling == RopeScaling::kNone) t.rope_scaling_factor = defaults.rope_scaling_factor;
  if (scaling == RopeScaling::kNone || scaling == RopeScaling::kLinear)
    t.rope_original_max_position_embeddings = defaults.rope_original_max_position_embeddings;
  if (scaling != RopeScaling::kLlama3) {
    t.rope_low_freq_factor = defaults.rope_low_freq_factor;
    t.rope_high_freq_factor = defaults.rope_high_freq_factor;
  }
  if (scaling != RopeScaling::kYarn) {
    t.yarn_beta_fast = defaults.yarn_beta_fast;
    t.yarn_beta_slow = defaults.yarn_beta_slow;
    t.yarn_correction_range_round_to_int = defaults.yarn_correction_range_round_to_int;
  }
  // With rotary positions max_position_embeddings is not architecture.
  if (t.position_embedding_type != PositionEmbedding::kLearnedAbsolute)
    t.max_position_embeddings = 1;
  Config* const configs[] = {&t};
  std::map<std::string, std::string> out;
  for (const FieldInfo& field : describe_fields(configs))
    if (field.role == FieldRole::kArchitecture) out[field.name] = format_yaml(field.value);
  return out;
}

}  // namespace

std::string architecture_difference(const TransformerConfig& a, const TransformerConfig& b) {
  const std::map<std::string, std::string> first = settings(a), second = settings(b);
  for (const auto& [name, value] : first) {
    const auto other = second.find(name);
    if (other == second.end() || other->second != value)
      return cat(name, " is ", value, ", not ", other == second.end() ? "set" : other->second);
  }
  return "";
}

}  // namespace megatron
