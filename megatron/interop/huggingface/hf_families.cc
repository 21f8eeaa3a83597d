#include "megatron/interop/huggingface/hf_families.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/format.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

using Rope = HfFields::Rope;

// -- names, as HfRow has them

const HfRow kBody[] = {{"embedding.word_embeddings.weight", {"model.embed_tokens.weight"}},
                       {".self_attention.linear_proj.@", {".self_attn.o_proj.@"}},
                       {"decoder.final_layernorm.@", {"model.norm.@"}}};

const HfRow kHead[] = {{"output_layer.weight", {"lm_head.weight"}}};

const HfRow kSeparateQKV[] = {
    {".self_attention.linear_qkv.@",
     {".self_attn.q_proj.@", ".self_attn.k_proj.@", ".self_attn.v_proj.@"},
     HfLayout::kSeparateQKV}};

const HfRow kGatedMlp[] = {
    {".mlp.linear_fc1.@", {".mlp.gate_proj.@", ".mlp.up_proj.@"}, HfLayout::kStacked},
    {".mlp.linear_fc2.@", {".mlp.down_proj.@"}}};

const HfRow kPreNorms[] = {{".self_attention.linear_qkv.layer_norm_@", {".input_layernorm.@"}},
                           {".mlp.linear_fc1.layer_norm_@", {".post_attention_layernorm.@"}}};

const HfRow kQKNorms[] = {{".self_attention.q_layernorm.weight", {".self_attn.q_norm.weight"}},
                          {".self_attention.k_layernorm.weight", {".self_attn.k_norm.weight"}}};

const HfRow kSandwichNorms[] = {
    {".self_attention.linear_qkv.layer_norm_weight", {".input_layernorm.weight"}},
    {".post_self_attn_layernorm.weight", {".post_attention_layernorm.weight"}},
    {".mlp.linear_fc1.layer_norm_weight", {".pre_feedforward_layernorm.weight"}},
    {".post_mlp_layernorm.weight", {".post_feedforward_layernorm.weight"}}};

const HfRow kPostNorms[] = {
    {".post_self_attn_layernorm.weight", {".post_attention_layernorm.weight"}},
    {".post_mlp_layernorm.weight", {".post_feedforward_layernorm.weight"}}};

const HfRow kPhi3[] = {
    {".self_attention.linear_qkv.weight", {".self_attn.qkv_proj.weight"}, HfLayout::kJoinedQKV},
    {".mlp.linear_fc1.weight", {".mlp.gate_up_proj.weight"}},
    {".mlp.linear_fc2.weight", {".mlp.down_proj.weight"}}};

const HfRow kStarcoder2Mlp[] = {{".mlp.linear_fc1.@", {".mlp.c_fc.@"}},
                                {".mlp.linear_fc2.@", {".mlp.c_proj.@"}}};

// Linear layers of GPT-2 are Conv1D modules, whose weights are [inputs, outputs].
const HfRow kGpt2[] = {
    {"embedding.word_embeddings.weight", {"transformer.wte.weight"}},
    {"embedding.position_embeddings.weight", {"transformer.wpe.weight"}},
    {".self_attention.linear_qkv.layer_norm_@", {".ln_1.@"}},
    {".self_attention.linear_qkv.@", {".attn.c_attn.@"}, HfLayout::kJoinedQKV, true},
    {".self_attention.linear_proj.@", {".attn.c_proj.@"}, HfLayout::kSame, true},
    {".mlp.linear_fc1.layer_norm_@", {".ln_2.@"}},
    {".mlp.linear_fc1.@", {".mlp.c_fc.@"}, HfLayout::kSame, true},
    {".mlp.linear_fc2.@", {".mlp.c_proj.@"}, HfLayout::kSame, true},
    {"decoder.final_layernorm.@", {"transformer.ln_f.@"}}};

// Rows of query_key_value are [query | key | value] per head, as ours are without query groups.
const HfRow kGptNeoX[] = {{"embedding.word_embeddings.weight", {"gpt_neox.embed_in.weight"}},
                          {".self_attention.linear_qkv.layer_norm_@", {".input_layernorm.@"}},
                          {".self_attention.linear_qkv.@", {".attention.query_key_value.@"}},
                          {".self_attention.linear_proj.@", {".attention.dense.@"}},
                          {".mlp.linear_fc1.layer_norm_@", {".post_attention_layernorm.@"}},
                          {".mlp.linear_fc1.@", {".mlp.dense_h_to_4h.@"}},
                          {".mlp.linear_fc2.@", {".mlp.dense_4h_to_h.@"}},
                          {"decoder.final_layernorm.@", {"gpt_neox.final_layer_norm.@"}},
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

void sizes(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size);
  f.integer("hidden_size", t.hidden_size);
  f.integer("intermediate_size", t.ffn_hidden_size);
  layers(f, "num_hidden_layers", t);
  f.integer("num_attention_heads", t.num_attention_heads);
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
  sizes(f, c);
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
  sizes(f, c);
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
  sizes(f, c);
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

const std::vector<HfFamily>& families() {
  static const std::vector<HfFamily> table = {
      {.model_type = "llama",
       .architecture = "LlamaForCausalLM",
       .rows = {kBody, kSeparateQKV, kGatedMlp, kPreNorms, kHead},
       .preset = rms_norm_gated,
       .fields = llama_fields},
      {.model_type = "mistral",
       .architecture = "MistralForCausalLM",
       .rows = {kBody, kSeparateQKV, kGatedMlp, kPreNorms, kHead},
       .preset = rms_norm_gated,
       .fields = mistral_fields},
      {.model_type = "qwen2",
       .architecture = "Qwen2ForCausalLM",
       .rows = {kBody, kSeparateQKV, kGatedMlp, kPreNorms, kHead},
       .preset =
           [](TransformerConfig& t) {
             rms_norm_gated(t);
             t.add_qkv_bias = true;
           },
       .fields = qwen2_fields},
      {.model_type = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .rows = {kBody, kSeparateQKV, kQKNorms, kGatedMlp, kPreNorms, kHead},
       .preset =
           [](TransformerConfig& t) {
             rms_norm_gated(t);
             t.qk_layernorm = true;
           },
       .fields = qwen3_fields},
      {.model_type = "gpt2",
       .architecture = "GPT2LMHeadModel",
       .rows = {kGpt2, kHead},
       .preset = [](TransformerConfig&) {},
       .fields = gpt2_fields,
       .prefix = "transformer.",
       .layers = "transformer.h.*",
       .waived = {"transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"}},
      {.model_type = "gpt_neox",
       .architecture = "GPTNeoXForCausalLM",
       .rows = {kGptNeoX},
       .preset = [](TransformerConfig& t) { t.position_embedding_type = PositionEmbedding::kRope; },
       .fields = gpt_neox_fields,
       .prefix = "gpt_neox.",
       .layers = "gpt_neox.layers.*",
       .aliases = {{"lm_head.weight", "embed_out.weight"}},
       .waived = {"gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias",
                  "gpt_neox.layers.*.attention.rotary_emb.inv_freq"}},
      {.model_type = "phi3",
       .architecture = "Phi3ForCausalLM",
       .rows = {kBody, kPhi3, kPreNorms, kHead},
       .preset = rms_norm_gated,
       .fields = phi3_fields},
      {.model_type = "gemma2",
       .architecture = "Gemma2ForCausalLM",
       .rows = {kBody, kSeparateQKV, kGatedMlp, kSandwichNorms, kHead},
       .preset = gemma_preset,
       .fields = gemma2_fields},
      {.model_type = "gemma3_text",
       .architecture = "Gemma3ForCausalLM",
       .rows = {kBody, kSeparateQKV, kQKNorms, kGatedMlp, kSandwichNorms, kHead},
       .preset =
           [](TransformerConfig& t) {
             gemma_preset(t);
             t.qk_layernorm = true;
           },
       .fields = gemma3_fields},
      {.model_type = "olmo2",
       .architecture = "Olmo2ForCausalLM",
       .rows = {kBody, kSeparateQKV, kQKNorms, kGatedMlp, kPostNorms, kHead},
       .preset =
           [](TransformerConfig& t) {
             rms_norm_gated(t);
             t.norm_placement = NormPlacement::kPost;
             t.qk_layernorm = t.qk_layernorm_over_heads = true;
           },
       .fields = olmo2_fields},
      {.model_type = "starcoder2",
       .architecture = "Starcoder2ForCausalLM",
       .rows = {kBody, kStarcoder2Mlp, kSeparateQKV, kPreNorms, kHead},
       .preset = [](TransformerConfig& t) { t.position_embedding_type = PositionEmbedding::kRope; },
       .fields = starcoder2_fields},
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

std::string hf_family_names() { return listed(families(), &HfFamily::model_type); }

namespace {

// A row with its names written out.
struct Names {
  std::string ours;
  std::vector<std::string> theirs;
  const HfRow* row;
};

std::vector<Names> names_of(const HfFamily& family) {
  std::vector<Names> all;
  for (const std::span<const HfRow> rows : family.rows)
    for (const HfRow& row : rows)
      for (const char* word : {"weight", "bias"}) {
        const auto full = [&](std::string_view name, std::string_view layers) {
          std::string text = name.starts_with('.') ? cat(layers, name) : std::string(name);
          if (const size_t at = text.find('@'); at != std::string::npos) text.replace(at, 1, word);
          return text;
        };
        Names& names = all.emplace_back(Names{full(row.ours, "decoder.layers.*"), {}, &row});
        for (const std::string_view theirs : row.theirs)
          names.theirs.push_back(full(theirs, family.layers));
        if (row.ours.find('@') == row.ours.npos) break;
      }
  return all;
}

// The tensors of a parameter, or of one expert of it (-1: all), which has this shape.
void add_parts(const Names& names, const std::vector<int64_t>& indices, const std::string& name,
               const std::vector<int64_t>& our_shape, int64_t expert,
               const std::vector<int64_t>& shape, const TransformerConfig& t,
               std::vector<HfTensor>& tensors) {
  const HfRow& row = *names.row;
  const size_t parts = names.theirs.size();
  for (size_t part = 0; part < parts; ++part) {
    HfTensor tensor;
    tensor.name = with_indices(names.theirs[part], indices);
    tensor.shape = shape;
    tensor.shape[0] = rows_of_part(row.layout, part, parts, shape[0], t);
    tensor.runs = row_runs(row.layout, part, tensor.shape[0], t);
    tensor.transposed = row.transposed && shape.size() == 2;
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
  const std::vector<Names> all = names_of(family);
  std::vector<HfTensor> tensors;
  for (const auto& [name, shape] : parameters) {
    const Names* names = nullptr;
    std::vector<int64_t> indices;
    for (const Names& candidate : all)
      if (auto match = indices_of(candidate.ours, name)) {
        names = &candidate;
        indices = std::move(*match);
      }
    MEGATRON_CHECK(names != nullptr, "a ", family.model_type,
                   " model of Hugging Face has no tensor for ", name);
    const std::string& theirs = names->theirs.front();
    if (std::count(theirs.begin(), theirs.end(), '*') <= std::ssize(indices)) {
      add_parts(*names, indices, name, shape, -1, shape, config, tensors);
      continue;
    }
    const std::vector<int64_t> of_expert(shape.begin() + 1, shape.end());
    indices.push_back(0);
    for (int64_t& expert = indices.back(); expert < shape[0]; ++expert)
      add_parts(*names, indices, name, shape, expert, of_expert, config, tensors);
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
