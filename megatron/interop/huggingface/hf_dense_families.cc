// Families whose layers all have one MLP.
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/interop/huggingface/detail/hf_common.h"

namespace megatron {
namespace {

using namespace hf;  // NOLINT: names of the tables

// -- names, as HfRow has them

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

void gemma_preset(TransformerConfig& t) {
  rms_norm_gated(t);
  t.swiglu = false;
  t.geglu = true;
  t.layernorm_zero_centered_gamma = true;
  t.norm_placement = NormPlacement::kSandwich;
  t.scale_embeddings = true;
}

// -- keys

void llama_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.norm_eps = 1e-6});
  head_dim(f, t);
  f.constant("hidden_act", "\"silu\"");
  linear_biases(f, t);
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

void gemma_common(HfFields& f, ModelConfig& c, int64_t max_positions, double attention_cap,
                  double final_cap) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.tied = true, .max_positions = max_positions, .groups = 4});
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
  gemma_common(f, c, 8192, 50.0, 30.0);
  f.rope(t, {});
  std::optional<int64_t> width = window_width(t);
  f.integer_or_null("sliding_window", width, 4096);
  layer_windows(f, t, width, [](int64_t i) { return i % 2 == 0; });
}

void gemma3_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  gemma_common(f, c, 131072, 0.0, 0.0);
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

}  // namespace

std::vector<HfFamily> dense_hf_families() {
  return {
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
}

}  // namespace megatron
