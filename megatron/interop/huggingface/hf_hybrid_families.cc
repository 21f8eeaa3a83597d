// Families whose layers are one residual connection each: Mamba-2, attention or MLP.
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
  std::string_view heads, head_size, state;
  int64_t num_heads, chunk;  // where the keys are absent
};

void mixer(HfFields& f, TransformerConfig& t, const MixerKeys& keys) {
  int64_t heads = f.reading() ? 0 : t.mamba_heads(t);
  f.integer(keys.heads, heads, keys.num_heads);
  t.mamba_num_heads = heads;
  f.integer(keys.head_size, t.mamba_head_dim, 64);
  f.integer(keys.state, t.mamba_state_dim, 128);
  f.integer("n_groups", t.mamba_num_groups, 8);
  f.integer("chunk_size", t.mamba_chunk_size, keys.chunk);
  f.range("time_step_limit", t.mamba_dt_limit);
  f.number("layer_norm_epsilon", t.layernorm_epsilon, 1e-5);
  if (f.reading()) t.mamba_norm_epsilon = t.layernorm_epsilon;
  f.constant("conv_kernel", std::to_string(kMambaConvWidth));
  f.constant("use_bias", "false");
  f.constant("use_conv_bias", "true");
}

void mamba2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  f.integer("vocab_size", c.vocab_size, 32768);
  f.integer("hidden_size", t.hidden_size);
  layers(f, "num_hidden_layers", t);
  mixer(f, t, {"num_heads", "head_dim", "state_size", 128, 256});
  f.constant("hidden_act", "\"silu\"");
  f.number("initializer_range", t.init_method_std, 0.1);
  tied(f, t, false);
  if (f.reading()) {
    t.hybrid_layer_pattern = std::string(static_cast<size_t>(t.num_layers), 'M');
    t.max_position_embeddings = 8192;  // there are no positions; what runs take if nothing is said
    return;
  }
  MEGATRON_CHECK(t.mamba_width(t) % t.hidden_size == 0,
                 "a mamba2 model of Hugging Face has a multiple of hidden_size ", t.hidden_size,
                 " as the width of its heads, this one ", t.mamba_width(t));
  f.set("expand", std::to_string(t.mamba_width(t) / t.hidden_size));
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
  mixer(f, t, {"mamba_num_heads", "mamba_head_dim", "ssm_state_size", 128, 128});
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
           .waived = {}}};
}

}  // namespace megatron
