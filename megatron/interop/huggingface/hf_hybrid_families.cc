// Families with layers that carry states: Mamba-2 and gated delta nets. In the first ones a layer
// is one residual connection; in the others two, a mixer and an MLP, which are two letters of ours.
#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/interop/huggingface/detail/hf_common.h"

namespace megatron {
namespace {

using namespace hf;  // NOLINT: names of the tables

// -- names, as HfRow has them

const HfRow kMamba[] = {{"embedding.word_embeddings.weight", {"backbone.embeddings.weight"}},
                        {"decoder.final_norm.weight", {"backbone.norm_f.weight"}},
                        {".mixer.in_proj.layer_norm_weight", {".norm.weight"}},
                        {".mixer.in_proj.weight", {".mixer.in_proj.weight"}},
                        {".mixer.conv1d_@", {".mixer.conv1d.@"}},
                        {".mixer.dt_bias", {".mixer.dt_bias"}},
                        {".mixer.A_log", {".mixer.A_log"}},
                        {".mixer.D", {".mixer.D"}},
                        {".mixer.norm.weight", {".mixer.norm.weight"}},
                        {".mixer.out_proj.weight", {".mixer.out_proj.weight"}}};

const HfRow kNemotronLayers[] = {
    {".self_attention.linear_qkv.layer_norm_weight", {".norm.weight"}},
    {".self_attention.linear_qkv.weight",
     {".mixer.q_proj.weight", ".mixer.k_proj.weight", ".mixer.v_proj.weight"},
     HfLayout::kSeparateQKV},
    {".self_attention.linear_proj.weight", {".mixer.o_proj.weight"}},
    {".mlp.linear_fc1.layer_norm_weight", {".norm.weight"}},
    {".mlp.linear_fc1.weight", {".mixer.up_proj.weight"}},
    {".mlp.linear_fc2.weight", {".mixer.down_proj.weight"}}};

const HfRow kMixerBeforeMlp[] = {
    {"embedding.word_embeddings.weight", {"model.embed_tokens.weight"}},
    {".mixer.in_proj.layer_norm_weight", {".input_layernorm.weight"}},
    {".mixer.in_proj.weight", {".mamba.in_proj.weight"}},
    {".mixer.conv1d_@", {".mamba.conv1d.@"}},
    {".mixer.dt_bias", {".mamba.dt_bias"}},
    {".mixer.A_log", {".mamba.A_log"}},
    {".mixer.D", {".mamba.D"}},
    {".mixer.norm.weight", {".mamba.norm.weight"}},
    {".mixer.out_proj.weight", {".mamba.out_proj.weight"}},
    {".self_attention.in_proj.layer_norm_weight", {".input_layernorm.weight"}},
    {".self_attention.in_proj.weight",
     {".linear_attn.in_proj_qkv.weight", ".linear_attn.in_proj_z.weight",
      ".linear_attn.in_proj_b.weight", ".linear_attn.in_proj_a.weight"},
     HfLayout::kSeparateDelta},
    {".self_attention.conv1d.weight", {".linear_attn.conv1d.weight"}},
    {".self_attention.dt_bias", {".linear_attn.dt_bias"}},
    {".self_attention.A_log", {".linear_attn.A_log"}},
    {".self_attention.out_norm.weight", {".linear_attn.norm.weight"}},
    {".self_attention.out_proj.weight", {".linear_attn.out_proj.weight"}},
    {".self_attention.linear_qkv.layer_norm_weight", {".input_layernorm.weight"}},
    {".self_attention.linear_proj.weight", {".self_attn.o_proj.weight"}}};

const HfRow kBamba[] = {{".mlp.linear_fc1.layer_norm_weight", {".pre_ff_layernorm.weight"}},
                        {".mlp.linear_fc1.weight",
                         {".feed_forward.gate_proj.weight", ".feed_forward.up_proj.weight"},
                         HfLayout::kStacked},
                        {".mlp.linear_fc2.weight", {".feed_forward.down_proj.weight"}},
                        {"decoder.final_norm.weight", {"model.final_layernorm.weight"}}};

const HfRow kGranite[] = {
    {".mlp.linear_fc1.layer_norm_weight", {".post_attention_layernorm.weight"}},
    {".mlp.linear_fc1.weight", {".shared_mlp.input_linear.weight"}},
    {".mlp.linear_fc2.weight", {".shared_mlp.output_linear.weight"}},
    {"decoder.final_norm.weight", {"model.norm.weight"}}};

const HfRow kQwen[] = {{".mlp.linear_fc1.layer_norm_weight", {".post_attention_layernorm.weight"}},
                       {"decoder.final_norm.weight", {"model.norm.weight"}}};

// -- presets

void no_positions(TransformerConfig& t) {
  t.position_embedding_type = PositionEmbedding::kNone;
  t.normalization = Normalization::kRMSNorm;
  t.add_bias_linear = false;
  t.hidden_dropout = t.attention_dropout = 0.0;
}

// -- keys

// Those of a mixer, by their names in the family. residual_in_fp32 is not read: the type of the
// residual stream is a flag of a run.
struct MixerKeys {
  std::string_view heads, head_size, state, groups, chunk, conv_width, bias, conv_bias, epsilon;
  int64_t num_heads, states, num_groups, rows;  // where the keys are absent
};

constexpr MixerKeys kMamba2Keys = {
    "num_heads", "head_dim",      "state_size",         "n_groups", "chunk_size", "conv_kernel",
    "use_bias",  "use_conv_bias", "layer_norm_epsilon", 128,        128,          8,
    256};
constexpr MixerKeys kNemotronKeys = {"mamba_num_heads",
                                     "mamba_head_dim",
                                     "ssm_state_size",
                                     "n_groups",
                                     "chunk_size",
                                     "conv_kernel",
                                     "use_bias",
                                     "use_conv_bias",
                                     "layer_norm_epsilon",
                                     128,
                                     128,
                                     8,
                                     128};
constexpr MixerKeys kBambaKeys = {"mamba_n_heads",
                                  "mamba_d_head",
                                  "mamba_d_state",
                                  "mamba_n_groups",
                                  "mamba_chunk_size",
                                  "mamba_d_conv",
                                  "mamba_proj_bias",
                                  "mamba_conv_bias",
                                  "rms_norm_eps",
                                  128,
                                  256,
                                  1,
                                  256};

void mixer(HfFields& f, TransformerConfig& t, const MixerKeys& keys) {
  int64_t heads = f.reading() ? 0 : t.mamba_heads(t);
  f.integer(keys.heads, heads, keys.num_heads);
  t.mamba_num_heads = heads;
  if (!f.reading() || !f.is_text(keys.head_size, "auto"))
    f.integer(keys.head_size, t.mamba_head_dim, 64);
  f.integer(keys.state, t.mamba_state_dim, keys.states);
  f.integer(keys.groups, t.mamba_num_groups, keys.num_groups);
  f.integer(keys.chunk, t.mamba_chunk_size, keys.rows);
  f.range("time_step_limit", t.mamba_dt_limit);
  f.number(keys.epsilon, t.layernorm_epsilon, 1e-5);
  if (f.reading()) t.mamba_norm_epsilon = t.layernorm_epsilon;
  f.constant(keys.conv_width, std::to_string(kMambaConvWidth));
  f.constant(keys.bias, "false");
  f.constant(keys.conv_bias, "true");
}

// Writing: heads are together a multiple of the hidden size.
void expansion(HfFields& f, const TransformerConfig& t, std::string_view key, const char* family) {
  MEGATRON_CHECK(t.mamba_width(t) % t.hidden_size == 0, "a ", family,
                 " model of Hugging Face has a multiple of hidden_size ", t.hidden_size,
                 " as the width of its heads, this one ", t.mamba_width(t));
  f.set(key, std::to_string(t.mamba_width(t) / t.hidden_size));
}

void mamba2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size, 32768);
  f.integer("hidden_size", t.hidden_size);
  layers(f, "num_hidden_layers", t);
  mixer(f, t, kMamba2Keys);
  f.constant("hidden_act", "\"silu\"");
  f.number("initializer_range", t.init_method_std, 0.1);
  tied(f, t, false);
  if (f.reading()) {
    t.hybrid_layer_pattern = std::string(static_cast<size_t>(t.num_layers), 'M');
    t.max_position_embeddings = 8192;  // there are no positions; what runs take if nothing is said
    return;
  }
  expansion(f, t, "expand", "mamba2");
}

// Letters of layers and what layers_block_type calls them.
constexpr std::pair<char, std::string_view> kBlockTypes[] = {
    {'M', "linear_attention"}, {'*', "full_attention"}, {'-', "mlp"}, {'M', "mamba"},
    {'*', "attention"},
};

void nemotron_pattern(HfFields& f, TransformerConfig& t) {
  if (!f.reading()) {
    std::string types;
    for (const char letter : t.hybrid_letters()) {
      const auto* type =
          std::ranges::find(kBlockTypes, letter, &std::pair<char, std::string_view>::first);
      MEGATRON_CHECK(type != std::end(kBlockTypes),
                     "a nemotron_h model of Hugging Face has no layers ", std::string(1, letter),
                     " of ours");
      types += cat(types.empty() ? "" : ", ", '"', type->second, '"');
    }
    f.set("layers_block_type", cat("[", types, "]"));
    f.set("num_hidden_layers", std::to_string(t.num_layers));
    return f.erase("hybrid_override_pattern");
  }
  std::string pattern;
  f.text("hybrid_override_pattern", pattern, "");
  const std::vector<std::string> types = f.texts("layers_block_type");
  if (!types.empty()) pattern.clear();
  for (const std::string& name : types) {
    const auto* type =
        std::ranges::find(kBlockTypes, name, &std::pair<char, std::string_view>::second);
    MEGATRON_CHECK(
        type != std::end(kBlockTypes), f.name(), ": layers_block_type names \"", name,
        "\", expected linear_attention, full_attention or mlp; layers of experts are not "
        "built in this family");
    pattern += type->first;
  }
  MEGATRON_CHECK(!pattern.empty(), f.name(),
                 ": has neither hybrid_override_pattern nor layers_block_type");
  MEGATRON_CHECK(pattern.find_first_not_of("M*-") == std::string::npos, f.name(),
                 ": hybrid_override_pattern \"", pattern,
                 "\" has other letters than M, * and -; layers of experts are not built in this "
                 "family");
  const auto letters = static_cast<int64_t>(pattern.size());
  MEGATRON_CHECK(f.find_integer("num_hidden_layers").value_or(letters) == letters, f.name(),
                 ": num_hidden_layers is ", f.find_integer("num_hidden_layers").value_or(0),
                 ", the pattern of layers has ", letters);
  t.num_layers = letters;
  t.hybrid_layer_pattern = pattern;
}

void nemotron_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size, 131072);
  f.integer("hidden_size", t.hidden_size);
  nemotron_pattern(f, t);
  f.integer("intermediate_size", t.ffn_hidden_size, 21504);
  f.integer("num_attention_heads", t.num_attention_heads, 32);
  query_groups(f, t, 8);
  head_dim(f, t, /*always=*/true, 128);
  f.integer("max_position_embeddings", t.max_position_embeddings, 4096);
  mixer(f, t, kNemotronKeys);
  plain_activation(f, t, "mlp_hidden_act", "relu2");
  f.constant("mamba_hidden_act", "\"silu\"");
  f.constant("mamba_proj_bias", "false");
  f.constant("mlp_bias", "false");
  f.constant("attention_bias", "false");
  f.number("attention_dropout", t.attention_dropout, 0.0);
  f.number("hidden_dropout", t.hidden_dropout, 0.0);
  f.number("initializer_range", t.init_method_std, 0.02);
  tied(f, t, false);
}

// -- families whose layers are a mixer and an MLP

// Writing: the letters of the mixers; num_layers becomes the number of theirs.
std::string take_mixers(TransformerConfig& t, std::string_view mixers, std::string_view family) {
  const std::string letters = t.hybrid_letters();
  std::string found;
  for (size_t i = 0; i < letters.size(); ++i)
    if (i % 2 == 0) found += letters[i];
  const bool paired = !letters.empty() && letters.size() % 2 == 0 &&
                      found.find_first_not_of(mixers) == std::string::npos &&
                      std::ranges::count(letters, '-') * 2 == std::ssize(letters);
  MEGATRON_CHECK(paired, "layers of a ", family, " model of Hugging Face are ", mixers.substr(0, 1),
                 "- and ", mixers.substr(1, 1), "-, this model has the layers ",
                 letters.empty() ? "*-" : letters);
  t.num_layers = std::ssize(found);
  return found;
}

// Reading.
void set_mixers(TransformerConfig& t, const std::string& mixers) {
  t.hybrid_layer_pattern.clear();
  for (const char letter : mixers) t.hybrid_layer_pattern += {letter, '-'};
  t.num_layers = std::ssize(t.hybrid_layer_pattern);
}

// Reading: the mixers that layer_types or layers_block_type name; `recurrent` is the letter of
// those with states. Empty: neither key is there.
std::string named_mixers(const HfFields& f, const TransformerConfig& t, char recurrent) {
  std::string mixers;
  for (const char* key : {"layers_block_type", "layer_types"}) {
    const std::vector<std::string> types = f.texts(key);
    if (types.empty()) continue;
    MEGATRON_CHECK(std::ssize(types) == t.num_layers, f.name(), ": ", key, " names ", types.size(),
                   " layers, num_hidden_layers is ", t.num_layers);
    mixers.clear();
    for (const std::string& type : types) {
      const bool states = type == "linear_attention" || type == "mamba";
      MEGATRON_CHECK(states || type == "full_attention" || type == "attention", f.name(), ": ", key,
                     " names \"", type, "\", expected linear_attention or full_attention");
      mixers += states ? recurrent : '*';
    }
  }
  return mixers;
}

void write_layer_types(HfFields& f, std::string_view mixers) {
  std::vector<std::string> types;
  for (const char letter : mixers)
    types.emplace_back(letter == '*' ? "full_attention" : "linear_attention");
  f.layer_types(types);
  f.erase("layers_block_type");
}

// Rotary positions, of models with attention.
void rope_of_attention(HfFields& f, TransformerConfig& t, const Rope& rope) {
  if (t.has_letter('*')) return f.rope(t, rope);
  if (f.reading()) t.position_embedding_type = PositionEmbedding::kNone;
}

void bamba_mixer(HfFields& f, TransformerConfig& t, const char* family) {
  mixer(f, t, kBambaKeys);
  if (!f.reading()) return expansion(f, t, "mamba_expand", family);
  const int64_t heads = t.mamba_heads(t),
                width = f.find_integer("mamba_expand").value_or(2) * t.hidden_size;
  MEGATRON_CHECK(heads > 0 && width % heads == 0, f.name(), ": mamba_n_heads ", heads,
                 " does not divide mamba_expand hidden_size ", width);
  if (f.is_text(kBambaKeys.head_size, "auto")) t.mamba_head_dim = width / heads;
  MEGATRON_CHECK(t.mamba_width(t) == width, f.name(), ": mamba_n_heads ", heads,
                 " of mamba_d_head ", t.mamba_head_dim, " are not mamba_expand hidden_size ",
                 width);
}

void bamba_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  std::string mixers;
  if (!f.reading()) mixers = take_mixers(t, "M*", "bamba");
  common(f, c, {.norm_eps = 1e-5, .max_positions = 262144, .groups = 8});
  head_dim(f, t, /*always=*/false);
  bamba_mixer(f, t, "bamba");
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  f.constant("mlp_bias", "false");
  std::vector<int64_t> attention;
  for (int64_t i = 0; i < std::ssize(mixers); ++i)
    if (mixers[static_cast<size_t>(i)] == '*') attention.push_back(i);
  f.integers("attn_layer_indices", attention);
  if (f.reading()) {
    mixers.assign(static_cast<size_t>(t.num_layers), 'M');
    for (const int64_t layer : attention) {
      MEGATRON_CHECK(layer < t.num_layers, f.name(), ": attn_layer_indices names layer ", layer,
                     " of ", t.num_layers);
      mixers[static_cast<size_t>(layer)] = '*';
    }
    set_mixers(t, mixers);
    f.constant("partial_rotary_factor", "0.5");  // transformers heeds no other one here
  }
  rope_of_attention(f, t, {.percent = 0.5});
}

// Scores are multiplied by it.
void attention_multiplier(HfFields& f, TransformerConfig& t) {
  constexpr int kDigits = 15;  // fewer than a double has, so that the square and its root go back
  double scale = rounded(t.softmax_scale(), kDigits);
  f.number("attention_multiplier", scale, 1.0);
  if (!f.reading()) return;
  MEGATRON_CHECK(scale > 0.0, f.name(), ": attention_multiplier ", scale, " is not positive");
  t.query_pre_attn_scalar = 1.0 / (scale * scale);
}

void granite_positions(HfFields& f, TransformerConfig& t) {
  constexpr std::string_view kKey = "position_embedding_type";
  if (f.reading()) {
    if (f.is_text(kKey, "rope")) rope_of_attention(f, t, {});
    return;
  }
  if (t.position_embedding_type == PositionEmbedding::kRope) {
    f.set(kKey, "\"rope\"");
    f.rope(t, {});
  } else if (f.is_text(kKey, "rope")) {
    f.set(kKey, "null");
  }
}

void granite_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  std::string mixers;
  if (!f.reading()) mixers = take_mixers(t, "M*", "granitemoehybrid");
  const int64_t experts = f.reading() ? f.find_integer("num_local_experts").value_or(8) : 0;
  MEGATRON_CHECK(experts == 0, f.name(), ": num_local_experts is ", experts,
                 ", models of this type are built without experts, with 0");
  if (!f.reading()) f.set("num_local_experts", "0");
  f.integer("vocab_size", c.vocab_size, 32000);
  f.integer("hidden_size", t.hidden_size);
  f.integer("shared_intermediate_size", t.ffn_hidden_size, 1024);
  layers(f, "num_hidden_layers", t);
  f.integer("num_attention_heads", t.num_attention_heads, 32);
  query_groups(f, t);
  head_dim(f, t, /*always=*/false);
  f.integer("max_position_embeddings", t.max_position_embeddings, 2048);
  bamba_mixer(f, t, "granitemoehybrid");
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  f.number("attention_dropout", t.attention_dropout, 0.0);
  f.number("initializer_range", t.init_method_std, 0.02);
  f.number("embedding_multiplier", t.embedding_multiplier, 1.0);
  f.number("residual_multiplier", t.residual_multiplier, 1.0);
  f.number("logits_scaling", t.logits_scaling, 1.0);
  attention_multiplier(f, t);
  tied(f, t, false);
  if (f.reading()) {
    mixers = named_mixers(f, t, 'M');
    if (mixers.empty()) mixers.assign(static_cast<size_t>(t.num_layers), 'M');
    set_mixers(t, mixers);
  } else {
    write_layer_types(f, mixers);
  }
  granite_positions(f, t);
}

void qwen35_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  std::string mixers;
  if (!f.reading()) mixers = take_mixers(t, "G*", "qwen3_5_text");
  common(f, c, {.max_positions = 32768, .groups = 4});
  head_dim(f, t, /*always=*/true, 256);
  f.integer("linear_num_key_heads", t.linear_num_key_heads, 16);
  f.integer("linear_num_value_heads", t.linear_num_value_heads, 32);
  f.integer("linear_key_head_dim", t.linear_key_head_dim, 128);
  f.integer("linear_value_head_dim", t.linear_value_head_dim, 128);
  f.integer("linear_conv_kernel_dim", t.linear_conv_kernel_dim, 4);
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  if (f.reading()) {
    mixers = named_mixers(f, t, 'G');
    const int64_t every = f.find_integer("full_attention_interval").value_or(4);
    MEGATRON_CHECK(every > 0, f.name(), ": full_attention_interval is ", every);
    for (int64_t i = std::ssize(mixers); i < t.num_layers; ++i)
      mixers += (i + 1) % every == 0 ? '*' : 'G';
    set_mixers(t, mixers);
  } else {
    write_layer_types(f, mixers);
  }
  rope_of_attention(f, t,
                    {.percent = 0.25, .without_effect = {"mrope_section", "mrope_interleaved"}});
}

}  // namespace

std::vector<HfFamily> hybrid_hf_families() {
  return {{.model_type = "mamba2",
           .architecture = "Mamba2ForCausalLM",
           .rows = {kMamba, kHead},
           .preset = no_positions,
           .fields = mamba2_fields,
           .prefix = "backbone.",
           .layers = "backbone.layers.*",
           .aliases = {{"backbone.embedding.weight", "backbone.embeddings.weight"}},
           .waived = {}},
          {.model_type = "nemotron_h",
           .architecture = "NemotronHForCausalLM",
           .rows = {kMamba, kNemotronLayers, kHead},
           .preset =
               [](TransformerConfig& t) {
                 no_positions(t);
                 t.squared_relu = true;
               },
           .fields = nemotron_fields,
           .prefix = "backbone.",
           .layers = "backbone.layers.*",
           .waived = {}},
          {.model_type = "bamba",
           .architecture = "BambaForCausalLM",
           .rows = {kMixerBeforeMlp, kSeparateQKV, kBamba, kHead},
           .preset = rms_norm_gated,
           .fields = bamba_fields,
           .sublayers = 2},
          {.model_type = "granitemoehybrid",
           .architecture = "GraniteMoeHybridForCausalLM",
           .rows = {kMixerBeforeMlp, kSeparateQKV, kGranite, kHead},
           .preset =
               [](TransformerConfig& t) {
                 rms_norm_gated(t);
                 t.position_embedding_type = PositionEmbedding::kNone;
               },
           .fields = granite_fields,
           .sublayers = 2},
          {.model_type = "qwen3_5_text",
           .architecture = "Qwen3_5ForCausalLM",
           .rows = {kMixerBeforeMlp, kSeparateQKV, kQKNorms, kGatedMlp, kQwen, kHead},
           .preset =
               [](TransformerConfig& t) {
                 rms_norm_gated(t);
                 t.layernorm_zero_centered_gamma = true;
                 t.qk_layernorm = true;
                 t.attention_output_gate = true;
               },
           .fields = qwen35_fields,
           // Of the model of pictures around it, and of predicted tokens
           .waived = {"mtp.*", "model.visual.*", "visual.*"},
           .sublayers = 2,
           .enclosing = {"qwen3_5", "model.language_model."}}};
}

}  // namespace megatron
