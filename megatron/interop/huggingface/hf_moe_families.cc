// Families with layers of experts (mixtures of experts), some of them with multi-latent attention
// and with layers that predict further tokens.
#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/interop/huggingface/detail/hf_common.h"

namespace megatron {
namespace {

using namespace hf;  // NOLINT: names of the tables

// -- names, as HfRow has them

const HfRow kExpertNorms[] = {{".pre_mlp_layernorm.@", {".post_attention_layernorm.@"}}};

// The names that transformers has in memory, which some files have, too.
const HfRow kStackedExperts[] = {{".mlp.experts.linear_fc1.weight", {".mlp.experts.gate_up_proj"}},
                                 {".mlp.experts.linear_fc2.weight", {".mlp.experts.down_proj"}}};

const HfRow kMixtral[] = {
    {".mlp.router.weight", {".block_sparse_moe.gate.weight"}},
    {".mlp.experts.linear_fc1.weight",
     {".block_sparse_moe.experts.*.w1.weight", ".block_sparse_moe.experts.*.w3.weight"},
     HfLayout::kStacked},
    {".mlp.experts.linear_fc2.weight", {".block_sparse_moe.experts.*.w2.weight"}},
    {".mlp.router.weight", {".mlp.gate.weight"}}};

const HfRow kExpertMlps[] = {
    {".mlp.router.weight", {".mlp.gate.weight"}},
    {".mlp.experts.linear_fc1.weight",
     {".mlp.experts.*.gate_proj.weight", ".mlp.experts.*.up_proj.weight"},
     HfLayout::kStacked},
    {".mlp.experts.linear_fc2.weight", {".mlp.experts.*.down_proj.weight"}}};

const HfRow kGatedSharedExpert[] = {
    {".mlp.shared_experts.linear_fc1.weight",
     {".mlp.shared_expert.gate_proj.weight", ".mlp.shared_expert.up_proj.weight"},
     HfLayout::kStacked},
    {".mlp.shared_experts.linear_fc2.weight", {".mlp.shared_expert.down_proj.weight"}},
    {".mlp.shared_experts.gate_weight", {".mlp.shared_expert_gate.weight"}}};

const HfRow kSharedExperts[] = {
    {".mlp.shared_experts.linear_fc1.weight",
     {".mlp.shared_experts.gate_proj.weight", ".mlp.shared_experts.up_proj.weight"},
     HfLayout::kStacked},
    {".mlp.shared_experts.linear_fc2.weight", {".mlp.shared_experts.down_proj.weight"}}};

const HfRow kExpertBias[] = {{".mlp.router.expert_bias", {".mlp.gate.e_score_correction_bias"}}};

// As transformers has them, [inputs, outputs].
const HfRow kGptOss[] = {
    {".self_attention.core_attention.softmax_offset", {".self_attn.sinks"}},
    {".mlp.router.@", {".mlp.router.@"}},
    {".mlp.experts.linear_fc1.weight",
     {".mlp.experts.gate_up_proj"},
     HfLayout::kAlternating,
     /*transposed=*/true},
    {".mlp.experts.linear_fc1.bias", {".mlp.experts.gate_up_proj_bias"}, HfLayout::kAlternating},
    {".mlp.experts.linear_fc2.weight",
     {".mlp.experts.down_proj"},
     HfLayout::kSame,
     /*transposed=*/true},
    {".mlp.experts.linear_fc2.bias", {".mlp.experts.down_proj_bias"}}};

// Experts by themselves, [outputs, inputs], as GGUF files have them.
const HfRow kGptOssMatrices[] = {{".mlp.experts.linear_fc1.@",
                                  {".mlp.experts.*.gate_proj.@", ".mlp.experts.*.up_proj.@"},
                                  HfLayout::kStacked},
                                 {".mlp.experts.linear_fc2.@", {".mlp.experts.*.down_proj.@"}}};

const HfRow kLatentAttention[] = {
    {".input_layernorm.weight", {".input_layernorm.weight"}},
    {".self_attention.linear_q_proj.weight", {".self_attn.q_proj.weight"}},
    {".self_attention.linear_q_down_proj.weight", {".self_attn.q_a_proj.weight"}},
    {".self_attention.linear_q_up_proj.layer_norm_weight", {".self_attn.q_a_layernorm.weight"}},
    {".self_attention.linear_q_up_proj.weight", {".self_attn.q_b_proj.weight"}},
    {".self_attention.linear_kv_down_proj.weight", {".self_attn.kv_a_proj_with_mqa.weight"}},
    {".self_attention.linear_kv_up_proj.layer_norm_weight", {".self_attn.kv_a_layernorm.weight"}},
    {".self_attention.linear_kv_up_proj.weight", {".self_attn.kv_b_proj.weight"}}};

const HfRow kMultiTokenLayers[] = {
    {"mtp.layers.*.enorm.weight", {".enorm.weight"}},
    {"mtp.layers.*.hnorm.weight", {".hnorm.weight"}},
    {"mtp.layers.*.eh_proj.weight", {".eh_proj.weight"}},
    {"mtp.layers.*.final_layernorm.weight", {".shared_head.norm.weight"}}};

// -- presets

void qkv_biases(TransformerConfig& t) {
  rms_norm_gated(t);
  t.add_qkv_bias = true;
}

void qk_norms(TransformerConfig& t) {
  rms_norm_gated(t);
  t.qk_layernorm = true;
}

void qk_norms_over_heads(TransformerConfig& t) {
  qk_norms(t);
  t.qk_layernorm_over_heads = true;
}

void latent_attention_preset(TransformerConfig& t) {
  rms_norm_gated(t);
  t.multi_latent_attention = t.qk_layernorm = true;
  t.latent_norm_epsilon = 1e-6;  // whatever rms_norm_eps says
}

void deepseek_v3_preset(TransformerConfig& t) {
  latent_attention_preset(t);
  t.moe_router_score_function = RouterScore::kSigmoid;
  t.moe_router_enable_expert_bias = true;
}

void gpt_oss_preset(TransformerConfig& t) {
  rms_norm_gated(t);
  t.swiglu = false;
  t.quick_geglu = t.add_bias_linear = true;
  t.glu_linear_offset = 1.0;
  t.softmax_type = SoftmaxType::kLearnable;
}

void glm4_moe_preset(TransformerConfig& t) {
  rms_norm_gated(t);
  t.moe_router_score_function = RouterScore::kSigmoid;
  t.moe_router_enable_expert_bias = true;
}

// -- keys

// The number of experts by its key, and of those that a token uses.
void experts(HfFields& f, TransformerConfig& t, std::string_view key, int64_t count, int64_t topk) {
  f.integer(key, t.num_experts, count);
  constexpr int64_t kMost = 65536;  // bounds memory: an expert has names
  MEGATRON_CHECK(!f.reading() || (t.num_experts > 0 && t.num_experts <= kMost), f.name(), ": ", key,
                 " is ", t.num_experts, ", expected 1 to ", kMost);
  f.integer("num_experts_per_tok", t.moe_router_topk, topk);
}

// Reading: gives the layers of which `has_experts(layer)`, layers from 0, experts.
void set_moe_layers(const HfFields& f, TransformerConfig& t,
                    const std::function<bool(int64_t layer)>& has_experts) {
  std::string runs;  // "[0]*3+[1]*58"
  bool any = false, all = true;
  for (int64_t i = 0; i < t.num_layers;) {
    const bool experts = has_experts(i);
    int64_t end = i + 1;
    while (end < t.num_layers && has_experts(end) == experts) ++end;
    runs += cat(runs.empty() ? "" : "+", experts ? "[1]" : "[0]");
    if (end - i > 1) runs += cat("*", end - i);
    any |= experts;
    all &= experts;
    i = end;
  }
  MEGATRON_CHECK(any, f.name(), ": no layer has experts");
  t.moe_layer_freq = all ? "1" : runs;
}

// Layer i, from 0, has experts if (i + 1) % step = 0 and it is not listed.
void sparse_step(HfFields& f, TransformerConfig& t) {
  int64_t step = 0;
  std::vector<int64_t> dense;
  if (!f.reading()) {
    for (int64_t i = 1; i <= t.num_layers; ++i)
      if (t.is_moe_layer(i)) step = std::gcd(step, i);
    step = std::max<int64_t>(step, 1);
    for (int64_t i = 1; i <= t.num_layers; ++i)
      if (i % step == 0 && !t.is_moe_layer(i)) dense.push_back(i - 1);
  }
  f.integer("decoder_sparse_step", step, 1);
  f.integers("mlp_only_layers", dense);
  if (!f.reading()) return;
  MEGATRON_CHECK(step > 0, f.name(), ": decoder_sparse_step is 0");
  set_moe_layers(f, t, [&](int64_t i) {
    return (i + 1) % step == 0 && std::find(dense.begin(), dense.end(), i) == dense.end();
  });
}

void first_dense_layers(HfFields& f, TransformerConfig& t, int64_t missing) {
  int64_t first = 0;
  while (!f.reading() && first < t.num_layers && !t.is_moe_layer(first + 1)) ++first;
  f.integer("first_k_dense_replace", first, missing);
  if (f.reading()) set_moe_layers(f, t, [&](int64_t i) { return i >= first; });
}

void expert_width(HfFields& f, TransformerConfig& t, int64_t missing) {
  int64_t width = t.expert_ffn_size(t);
  f.integer("moe_intermediate_size", width, missing);
  t.moe_ffn_hidden_size = width;
}

// Families of which intermediate_size is the width of an expert.
void experts_in_all_layers(HfFields& f, TransformerConfig& t) {
  if (!f.reading() && t.num_moe_layers(t.num_layers) == t.num_layers)
    t.ffn_hidden_size = t.expert_ffn_size(t);
}

void renormalised_weights(HfFields& f, TransformerConfig& t) {
  bool renormalised = !t.moe_router_pre_softmax;
  f.flag("norm_topk_prob", renormalised, false);
  t.moe_router_pre_softmax = !renormalised;
}

void mixtral_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  experts_in_all_layers(f, t);
  common(f, c, {.norm_eps = 1e-5, .max_positions = 4096 * 32, .groups = 8});
  head_dim(f, t, /*always=*/false);
  f.constant("hidden_act", "\"silu\"");
  one_window(f, t, std::nullopt);
  f.rope(t, {.theta = 1e6});
  experts(f, t, "num_local_experts", 8, 2);
  double jitter = t.moe_input_jitter_eps.value_or(0.0);
  f.number("router_jitter_noise", jitter, 0.0);
  if (jitter > 0.0) t.moe_input_jitter_eps = jitter;
}

void qwen2_moe_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.max_positions = 32768, .groups = 16});
  head_dim(f, t, /*always=*/false);
  f.constant("hidden_act", "\"silu\"");
  f.constant("qkv_bias", "true");
  f.rope(t, {});
  bool use = !t.window_size.empty();
  f.flag("use_sliding_window", use, false);
  std::optional<int64_t> width = window_width(t);
  if (use) f.integer_or_null("sliding_window", width, 4096);
  const int64_t most = f.find_integer("max_window_layers").value_or(28);
  layer_windows(f, t, width, [&](int64_t i) { return i % 2 == 0 && i < most; });
  experts(f, t, "num_experts", 60, 4);
  expert_width(f, t, 1408);
  renormalised_weights(f, t);
  int64_t shared = t.moe_shared_expert_intermediate_size.value_or(0);
  f.integer("shared_expert_intermediate_size", shared, 5632);
  if (f.reading()) t.moe_shared_expert_intermediate_size = shared;
  sparse_step(f, t);
}

void qwen3_moe_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.max_positions = 32768, .groups = 4});
  head_dim(f, t, /*always=*/true);
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  f.rope(t, {});
  bool use = !t.window_size.empty();
  f.flag("use_sliding_window", use, false);
  if (use) one_window(f, t, 4096);
  experts(f, t, f.find_integer("num_local_experts") ? "num_local_experts" : "num_experts", 128, 8);
  expert_width(f, t, 768);
  renormalised_weights(f, t);
  sparse_step(f, t);
}

void olmoe_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  experts_in_all_layers(f, t);
  common(f, c, {.norm_eps = 1e-5, .max_positions = 4096});
  head_dim(f, t, /*always=*/false);
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  f.constant("clip_qkv", "null");
  f.rope(t, {});
  experts(f, t, "num_experts", 64, 8);
  renormalised_weights(f, t);
}

// Heads and latents, and what both DeepSeek families have around them.
void deepseek_common(HfFields& f, ModelConfig& c, int64_t max_positions) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.max_positions = max_positions});
  MEGATRON_CHECK(!t.group_query_attention, f.name(), ": num_key_value_heads ", t.num_query_groups,
                 " is not num_attention_heads ", t.num_attention_heads,
                 ", but the heads of latent attention share one latent");
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "false");
  f.integer_or_null("q_lora_rank", t.q_lora_rank, 1536);
  f.integer("kv_lora_rank", t.kv_lora_rank, 512);
  f.integer("qk_nope_head_dim", t.qk_head_dim, 128);
  f.integer("qk_rope_head_dim", t.qk_pos_emb_head_dim, 64);
  f.integer("v_head_dim", t.v_head_dim, 128);
  t.kv_channels = t.query_head_size();
  f.rope(t, {.latent = true});
}

// Width of the experts, routed and shared, and the factor of the routed ones.
void deepseek_experts(HfFields& f, TransformerConfig& t, int64_t width, int64_t shared,
                      double factor) {
  expert_width(f, t, width);
  f.constant("moe_layer_freq", "1");
  std::optional<int64_t> count;
  if (t.moe_shared_expert_intermediate_size)
    count = *t.moe_shared_expert_intermediate_size / std::max<int64_t>(1, *t.moe_ffn_hidden_size);
  f.integer_or_null("n_shared_experts", count, shared);
  if (f.reading() && count.value_or(0) > 0)
    t.moe_shared_expert_intermediate_size = *count * *t.moe_ffn_hidden_size;
  double scaling = t.moe_router_topk_scaling_factor.value_or(1.0);
  f.number("routed_scaling_factor", scaling, factor);
  if (scaling != 1.0) t.moe_router_topk_scaling_factor = scaling;
}

void deepseek_v2_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  deepseek_common(f, c, 2048);
  f.constant("mlp_bias", "false");
  experts(f, t, "n_routed_experts", 64, 6);
  deepseek_experts(f, t, 1407, 2, 1.0);
  first_dense_layers(f, t, 0);
  f.constant("scoring_func", "\"softmax\"");
  f.constant("norm_topk_prob", "false");
  if (f.reading()) t.moe_router_pre_softmax = true;
  std::string method = t.moe_router_num_groups ? "group_limited_greedy" : "greedy";
  f.text("topk_method", method, "greedy");
  const bool groups = method == "group_limited_greedy";
  MEGATRON_CHECK(groups || method == "greedy", f.name(), ": topk_method \"", method,
                 "\" is not built, only greedy and group_limited_greedy");
  if (!groups) return;
  f.integer_or_null("n_group", t.moe_router_num_groups, std::nullopt);
  f.integer_or_null("topk_group", t.moe_router_group_topk, std::nullopt);
  if (f.reading()) t.moe_router_group_score = GroupScore::kMax;
}

// Of routers with a bias: weights that sum to 1, and groups.
void biased_router(HfFields& f, TransformerConfig& t, int64_t missing_groups,
                   int64_t missing_kept) {
  f.constant("norm_topk_prob", "true");
  MEGATRON_CHECK(!f.reading() || t.moe_router_topk > 1, f.name(),
                 ": num_experts_per_tok 1 with norm_topk_prob gives the expert the weight 1 "
                 "whatever the router says, which is not built");
  int64_t groups = t.moe_router_num_groups.value_or(1), kept = t.moe_router_group_topk.value_or(1);
  f.integer("n_group", groups, missing_groups);
  f.integer("topk_group", kept, missing_kept);
  if (f.reading() && groups > 1) {
    MEGATRON_CHECK(kept > 0 && t.moe_router_topk / kept == 2, f.name(), ": num_experts_per_tok ",
                   t.moe_router_topk, " with topk_group ", kept,
                   " is not built: groups are ranked by their 2 best experts, which are "
                   "num_experts_per_tok / topk_group");
    t.moe_router_num_groups = groups;
    t.moe_router_group_topk = kept;
  }
}

void further_token_layers(HfFields& f, TransformerConfig& t) {
  f.integer("num_nextn_predict_layers", t.mtp_num_layers,
            f.find_integer("num_mtp_layers").value_or(0));
  constexpr int64_t kMost = 1000;  // bounds memory: a layer is an object
  MEGATRON_CHECK(t.mtp_num_layers <= kMost, f.name(), ": num_nextn_predict_layers is ",
                 t.mtp_num_layers, ", expected 0 to ", kMost);
}

void deepseek_v3_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  deepseek_common(f, c, 4096);
  f.constant("rope_interleave", "true");
  experts(f, t, "n_routed_experts", 256, 8);
  deepseek_experts(f, t, 2048, 1, 2.5);
  first_dense_layers(f, t, 3);
  f.constant("scoring_func", "\"sigmoid\"");
  f.constant("topk_method", "\"noaux_tc\"");
  biased_router(f, t, 8, 4);
  further_token_layers(f, t);
}

void glm4_moe_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  common(f, c, {.norm_eps = 1e-5, .max_positions = 131072, .groups = 8});
  head_dim(f, t, /*always=*/true);
  f.constant("hidden_act", "\"silu\"");
  f.flag("attention_bias", t.add_qkv_bias, false);
  f.flag("use_qk_norm", t.qk_layernorm, false);
  f.rope(t, {.percent = 0.5});
  experts(f, t, "n_routed_experts", 128, 8);
  deepseek_experts(f, t, 1408, 1, 1.0);
  first_dense_layers(f, t, 1);
  biased_router(f, t, 1, 1);
  further_token_layers(f, t);
}

void gpt_oss_fields(HfFields& f, ModelConfig& c) {
  TransformerConfig& t = c.transformer;
  experts_in_all_layers(f, t);
  common(f, c, {.norm_eps = 1e-5, .max_positions = 131072, .groups = 8});
  head_dim(f, t, /*always=*/true, 64);
  f.constant("hidden_act", "\"silu\"");
  f.constant("attention_bias", "true");
  f.constant("swiglu_alpha", "1.702");
  double limit = t.activation_func_clamp_value.value_or(0.0);
  f.number("swiglu_limit", limit, 7.0);
  if (f.reading()) t.activation_func_clamp_value = limit;
  std::optional<int64_t> width = window_width(t);
  f.integer_or_null("sliding_window", width, 128);
  layer_windows(f, t, width, [](int64_t i) { return i % 2 == 0; });
  f.rope(t, {.theta = 150000.0});
  experts(f, t, "num_local_experts", 128, 4);
}

}  // namespace

std::vector<HfFamily> moe_hf_families() {
  return {
      {.model_type = "mixtral",
       .architecture = "MixtralForCausalLM",
       .rows = {kBody, kSeparateQKV, kPreNorms, kExpertNorms, kMixtral, kStackedExperts, kHead},
       .preset = rms_norm_gated,
       .fields = mixtral_fields},
      {.model_type = "qwen2_moe",
       .architecture = "Qwen2MoeForCausalLM",
       .rows = {kBody, kSeparateQKV, kGatedMlp, kPreNorms, kExpertNorms, kExpertMlps,
                kStackedExperts, kGatedSharedExpert, kHead},
       .preset =
           [](TransformerConfig& t) {
             qkv_biases(t);
             t.moe_shared_expert_gate = true;
           },
       .fields = qwen2_moe_fields},
      {.model_type = "qwen3_moe",
       .architecture = "Qwen3MoeForCausalLM",
       .rows = {kBody, kSeparateQKV, kQKNorms, kGatedMlp, kPreNorms, kExpertNorms, kExpertMlps,
                kStackedExperts, kHead},
       .preset = qk_norms,
       .fields = qwen3_moe_fields},
      {.model_type = "olmoe",
       .architecture = "OlmoeForCausalLM",
       .rows = {kBody, kSeparateQKV, kQKNorms, kPreNorms, kExpertNorms, kExpertMlps,
                kStackedExperts, kHead},
       .preset = qk_norms_over_heads,
       .fields = olmoe_fields},
      {.model_type = "deepseek_v2",
       .architecture = "DeepseekV2ForCausalLM",
       .rows = {kBody, kLatentAttention, kGatedMlp, kPreNorms, kExpertNorms, kExpertMlps,
                kStackedExperts, kSharedExperts, kHead},
       .preset = latent_attention_preset,
       .fields = deepseek_v2_fields},
      {.model_type = "deepseek_v3",
       .architecture = "DeepseekV3ForCausalLM",
       .rows = {kBody, kLatentAttention, kGatedMlp, kPreNorms, kExpertNorms, kExpertMlps,
                kStackedExperts, kSharedExperts, kExpertBias, kMultiTokenLayers, kHead},
       .preset = deepseek_v3_preset,
       .fields = deepseek_v3_fields,
       .copies = {{"embedding.word_embeddings.weight", ".embed_tokens.weight"},
                  {"output_layer.weight", ".shared_head.head.weight"}}},
      {.model_type = "glm4_moe",
       .architecture = "Glm4MoeForCausalLM",
       .rows = {kBody, kSeparateQKV, kQKNorms, kGatedMlp, kPreNorms, kExpertNorms, kExpertMlps,
                kStackedExperts, kSharedExperts, kExpertBias, kMultiTokenLayers, kHead},
       .preset = glm4_moe_preset,
       .fields = glm4_moe_fields,
       .copies = {{"embedding.word_embeddings.weight", ".embed_tokens.weight"},
                  {"output_layer.weight", ".shared_head.head.weight"}}},
      {.model_type = "gpt_oss",
       .architecture = "GptOssForCausalLM",
       .rows = {kBody, kSeparateQKV, kPreNorms, kExpertNorms, kGptOss, kGptOssMatrices, kHead},
       .preset = gpt_oss_preset,
       .fields = gpt_oss_fields},
  };
}

}  // namespace megatron
