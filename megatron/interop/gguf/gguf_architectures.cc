#include "megatron/interop/gguf/gguf_architectures.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {
namespace gguf {  // families of Hugging Face have tables of the same names
namespace {

using Form = GgufForm;

// -- names

const GgufName kEnds[] = {
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};

const GgufName kAttention[] = {{"blk.*.attn_q", "model.layers.*.self_attn.q_proj"},
                               {"blk.*.attn_k", "model.layers.*.self_attn.k_proj"},
                               {"blk.*.attn_v", "model.layers.*.self_attn.v_proj"},
                               {"blk.*.attn_output", "model.layers.*.self_attn.o_proj"},
                               {"blk.*.attn_q_norm", "model.layers.*.self_attn.q_norm"},
                               {"blk.*.attn_k_norm", "model.layers.*.self_attn.k_norm"}};

const GgufName kPairedAttention[] = {
    {"blk.*.attn_q", "model.layers.*.self_attn.q_proj", Form::kPairedQueries},
    {"blk.*.attn_k", "model.layers.*.self_attn.k_proj", Form::kPairedKeys},
    {"blk.*.attn_v", "model.layers.*.self_attn.v_proj"},
    {"blk.*.attn_output", "model.layers.*.self_attn.o_proj"}};

const GgufName kNormsBefore[] = {{"blk.*.attn_norm", "model.layers.*.input_layernorm"},
                                 {"blk.*.ffn_norm", "model.layers.*.post_attention_layernorm"}};

const GgufName kNormsAfter[] = {
    {"blk.*.post_attention_norm", "model.layers.*.post_attention_layernorm"},
    {"blk.*.post_ffw_norm", "model.layers.*.post_feedforward_layernorm"}};

const GgufName kGatedMlp[] = {{"blk.*.ffn_gate", "model.layers.*.mlp.gate_proj"},
                              {"blk.*.ffn_up", "model.layers.*.mlp.up_proj"},
                              {"blk.*.ffn_down", "model.layers.*.mlp.down_proj"}};

const GgufName kGgufExperts[] = {
    {"blk.*.ffn_gate_inp", "model.layers.*.mlp.gate"},
    {"blk.*.ffn_gate_exps", "model.layers.*.mlp.experts.*.gate_proj"},
    {"blk.*.ffn_up_exps", "model.layers.*.mlp.experts.*.up_proj"},
    {"blk.*.ffn_down_exps", "model.layers.*.mlp.experts.*.down_proj"},
    {"blk.*.ffn_gate_shexp", "model.layers.*.mlp.shared_expert.gate_proj"},
    {"blk.*.ffn_up_shexp", "model.layers.*.mlp.shared_expert.up_proj"},
    {"blk.*.ffn_down_shexp", "model.layers.*.mlp.shared_expert.down_proj"},
    {"blk.*.ffn_gate_inp_shexp", "model.layers.*.mlp.shared_expert_gate", Form::kOneRow}};

// Older files have a tensor for each expert.
const GgufName kMixtralExperts[] = {
    {"blk.*.ffn_gate_inp", "model.layers.*.block_sparse_moe.gate"},
    {"blk.*.ffn_gate_exps", "model.layers.*.block_sparse_moe.experts.*.w1"},
    {"blk.*.ffn_down_exps", "model.layers.*.block_sparse_moe.experts.*.w2"},
    {"blk.*.ffn_up_exps", "model.layers.*.block_sparse_moe.experts.*.w3"},
    {"blk.*.ffn_gate.*", "model.layers.*.block_sparse_moe.experts.*.w1"},
    {"blk.*.ffn_down.*", "model.layers.*.block_sparse_moe.experts.*.w2"},
    {"blk.*.ffn_up.*", "model.layers.*.block_sparse_moe.experts.*.w3"}};

const GgufName kGemma[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm", Form::kFromOne},
    {"output", "lm_head"},
    {"blk.*.attn_norm", "model.layers.*.input_layernorm", Form::kFromOne},
    {"blk.*.post_attention_norm", "model.layers.*.post_attention_layernorm", Form::kFromOne},
    {"blk.*.ffn_norm", "model.layers.*.pre_feedforward_layernorm", Form::kFromOne},
    {"blk.*.post_ffw_norm", "model.layers.*.post_feedforward_layernorm", Form::kFromOne},
    {"blk.*.attn_q_norm", "model.layers.*.self_attn.q_norm", Form::kFromOne},
    {"blk.*.attn_k_norm", "model.layers.*.self_attn.k_norm", Form::kFromOne},
    {"blk.*.attn_q", "model.layers.*.self_attn.q_proj"},
    {"blk.*.attn_k", "model.layers.*.self_attn.k_proj"},
    {"blk.*.attn_v", "model.layers.*.self_attn.v_proj"},
    {"blk.*.attn_output", "model.layers.*.self_attn.o_proj"}};

const GgufName kGgufPhi3[] = {{"blk.*.attn_qkv", "model.layers.*.self_attn.qkv_proj"},
                              {"blk.*.attn_output", "model.layers.*.self_attn.o_proj"},
                              {"blk.*.ffn_up", "model.layers.*.mlp.gate_up_proj"},
                              {"blk.*.ffn_down", "model.layers.*.mlp.down_proj"}};

const GgufName kGgufStarcoder2Mlp[] = {{"blk.*.ffn_up", "model.layers.*.mlp.c_fc"},
                                       {"blk.*.ffn_down", "model.layers.*.mlp.c_proj"}};

const GgufName kGgufGpt2[] = {{"token_embd", "transformer.wte"},
                              {"position_embd", "transformer.wpe"},
                              {"output_norm", "transformer.ln_f"},
                              {"output", "lm_head"},
                              {"blk.*.attn_norm", "transformer.h.*.ln_1"},
                              {"blk.*.attn_qkv", "transformer.h.*.attn.c_attn"},
                              {"blk.*.attn_output", "transformer.h.*.attn.c_proj"},
                              {"blk.*.ffn_norm", "transformer.h.*.ln_2"},
                              {"blk.*.ffn_up", "transformer.h.*.mlp.c_fc"},
                              {"blk.*.ffn_down", "transformer.h.*.mlp.c_proj"}};

const GgufName kGgufGptNeoX[] = {
    {"token_embd", "gpt_neox.embed_in"},
    {"output_norm", "gpt_neox.final_layer_norm"},
    {"output", "embed_out"},
    {"blk.*.attn_norm", "gpt_neox.layers.*.input_layernorm"},
    {"blk.*.attn_qkv", "gpt_neox.layers.*.attention.query_key_value", Form::kJoinedByPart},
    {"blk.*.attn_output", "gpt_neox.layers.*.attention.dense"},
    {"blk.*.ffn_norm", "gpt_neox.layers.*.post_attention_layernorm"},
    {"blk.*.ffn_up", "gpt_neox.layers.*.mlp.dense_h_to_4h"},
    {"blk.*.ffn_down", "gpt_neox.layers.*.mlp.dense_4h_to_h"}};

// -- settings

int64_t vocab_size(GgufSettings& s) {
  const GgufTensor* const table = s.file().find_tensor("token_embd.weight");
  MEGATRON_CHECK(table != nullptr, s.file().path().string(),
                 ": tensor token_embd.weight is not there");
  MEGATRON_CHECK(table->shape.size() == 2, s.file().place(*table), ": has ", table->shape.size(),
                 " dimensions, expected 2");
  s.expect("vocab_size", table->shape[0]);
  return table->shape[0];
}

bool has(GgufSettings& s, std::string_view tensor) {
  return s.file().find_tensor(tensor) != nullptr;
}

// Sizes that all architectures have, and the tie; "causal" is what all of them are.
struct Sizes {
  int64_t hidden = 0, heads = 0, head_dim = 0, context = 0, layers = 0;
};

Sizes read_sizes(GgufSettings& s) {
  Sizes sizes;
  sizes.hidden = s.integer("embedding_length");
  sizes.layers = s.integer("block_count");
  sizes.heads = s.integer("attention.head_count");
  sizes.context = s.integer("context_length");
  MEGATRON_CHECK(sizes.heads > 0, s.file().place(s.full("attention.head_count")), ": is ",
                 sizes.heads, ", expected 1 or more");
  sizes.head_dim = s.integer("attention.key_length", sizes.hidden / sizes.heads);
  s.expect("attention.value_length", sizes.head_dim);
  s.expect("attention.causal", true);
  s.expect("pooling_type", int64_t{0});
  s.find_text("tensor_data_layout");
  s.json()
      .member("vocab_size", vocab_size(s))
      .member("tie_word_embeddings", !has(s, "output.weight"));
  return sizes;
}

// Sizes under the names that most families have for them.
Sizes write_sizes(GgufSettings& s) {
  const Sizes sizes = read_sizes(s);
  s.json()
      .member("hidden_size", sizes.hidden)
      .member("num_hidden_layers", sizes.layers)
      .member("num_attention_heads", sizes.heads)
      .member("num_key_value_heads", s.integer("attention.head_count_kv", sizes.heads))
      .member("head_dim", sizes.head_dim)
      .member("max_position_embeddings", sizes.context)
      .member("intermediate_size", s.integer("feed_forward_length"));
  return sizes;
}

void rms_norm(GgufSettings& s) {
  s.json().member("rms_norm_eps", s.number("attention.layer_norm_rms_epsilon"));
}

// The elements of a vector in fp32, of a tensor that belongs to the settings.
std::vector<double> vector_of(GgufSettings& s, const GgufTensor& tensor) {
  constexpr int64_t kMost = 1 << 16;
  MEGATRON_CHECK(tensor.shape.size() == 1 && tensor.shape[0] <= kMost && tensor.type->name == "F32",
                 s.file().place(tensor), ": expected a vector of F32");
  std::vector<float> values(static_cast<size_t>(tensor.shape[0]));
  s.file().read_at(tensor.offset, values.data(), tensor.bytes);
  std::vector<double> numbers;
  for (const float value : values) {
    MEGATRON_CHECK(std::isfinite(value) && value > 0, s.file().place(tensor), ": holds ", value,
                   ", expected positive numbers");
    numbers.push_back(shortest_number(value));
  }
  return numbers;
}

// Llama 3's scaling of rotary positions, which the files hold as what each frequency is divided by.
struct Llama3Scaling {
  double factor = 1.0, high = 4.0, original = 8192.0;  // for a low_freq_factor of 1

  double divisor(double frequency) const {
    const double turns = original * frequency / (2 * std::numbers::pi);  // in the original context
    if (turns > high) return 1.0;
    if (turns < 1.0) return factor;
    const double smooth = (turns - 1.0) / (high - 1.0);
    return 1.0 / ((1.0 - smooth) / factor + smooth);
  }
};

// Between the unscaled frequencies and the scaled ones 1 / divisor is linear in the frequency, so
// that two points give the line.
Llama3Scaling scaling_of(const std::vector<double>& divisors,
                         const std::vector<double>& frequencies) {
  Llama3Scaling found;
  found.factor = *std::max_element(divisors.begin(), divisors.end());
  std::vector<size_t> between;
  for (size_t i = 0; i < divisors.size(); ++i)
    if (divisors[i] > 1.0 && divisors[i] < found.factor) between.push_back(i);
  if (between.empty()) return found;
  const auto smooth = [&](size_t i) {
    return (1.0 / divisors[i] - 1.0 / found.factor) / (1.0 - 1.0 / found.factor);
  };
  const size_t a = between.front(), b = between.back();
  if (a == b) {  // with Llama 3's own high_freq_factor; the caller checks all points
    const double turns = 1.0 + smooth(a) * (found.high - 1.0);
    found.original = std::round(turns * 2 * std::numbers::pi / frequencies[a]);
    return found;
  }
  const double slope = (smooth(a) - smooth(b)) / (frequencies[a] - frequencies[b]);
  const double start = smooth(a) - slope * frequencies[a];  // -low / (high - low)
  if (!(start < 0)) return found;
  found.high = std::round((1.0 - 1.0 / start) * 1000.0) / 1000.0;
  found.original = std::round(slope * 2 * std::numbers::pi * (found.high - 1.0));
  return found;
}

bool write_llama3_scaling(GgufSettings& s, double theta, int64_t head_dim) {
  const GgufTensor* const tensor = s.file().find_tensor("rope_freqs.weight");
  if (tensor == nullptr) return false;
  const std::vector<double> divisors = vector_of(s, *tensor);
  MEGATRON_CHECK(std::ssize(divisors) == head_dim / 2, s.file().place(*tensor), ": has ",
                 divisors.size(), " elements, expected ", head_dim / 2, ", half of a head");
  std::vector<double> frequencies;
  for (int64_t i = 0; i < head_dim; i += 2)
    frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  const Llama3Scaling scaling = scaling_of(divisors, frequencies);
  for (size_t i = 0; i < divisors.size(); ++i)
    MEGATRON_CHECK(std::abs(scaling.divisor(frequencies[i]) / divisors[i] - 1) < 1e-4,
                   s.file().place(*tensor), ": element ", i, " is ", divisors[i],
                   ", which is not Llama 3's scaling of rotary positions (",
                   scaling.divisor(frequencies[i]), "); no other is built");
  s.json()
      .member("rope_type", "llama3")
      .member("factor", scaling.factor)
      .member("low_freq_factor", 1.0)
      .member("high_freq_factor", scaling.high)
      .member("original_max_position_embeddings", static_cast<int64_t>(scaling.original));
  return true;
}

void write_yarn(GgufSettings& s, int64_t context) {
  s.json()
      .member("rope_type", "yarn")
      .member("factor", s.number("rope.scaling.factor"))
      .member("original_max_position_embeddings",
              s.integer("rope.scaling.original_context_length", context))
      .member("beta_fast", s.number("rope.scaling.yarn_beta_fast", 32.0))
      .member("beta_slow", s.number("rope.scaling.yarn_beta_slow", 1.0));
  s.expect_number("rope.scaling.yarn_ext_factor", 1.0);
  for (const char* key : {"rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"})
    if (const auto factor = s.find_number(key)) s.json().member("attention_factor", *factor);
}

// The members of rope_parameters.
void write_rope(GgufSettings& s, const Sizes& sizes, double theta, bool partial = false) {
  theta = s.number("rope.freq_base", theta);
  s.json().begin_object().member("rope_theta", theta);
  const int64_t rotated = s.integer("rope.dimension_count", sizes.head_dim);
  MEGATRON_CHECK(partial || rotated == sizes.head_dim,
                 s.file().place(s.full("rope.dimension_count")), ": is ", rotated,
                 ", expected the size of a head, ", sizes.head_dim);
  if (partial)
    s.json().member("partial_rotary_factor",
                    static_cast<double>(rotated) / static_cast<double>(sizes.head_dim));
  const std::string type = s.find_text("rope.scaling.type").value_or("none");
  const double scale = s.number("rope.scale_linear", 1.0);
  s.find_boolean("rope.scaling.finetuned");
  if (type == "yarn") {
    write_yarn(s, sizes.context);
  } else if (type == "linear" || (type == "none" && scale != 1.0)) {
    s.json().member("rope_type", "linear").member("factor", s.number("rope.scaling.factor", scale));
  } else if (type == "none") {
    s.expect_number("rope.scaling.factor", 1.0);
    if (!write_llama3_scaling(s, theta, sizes.head_dim)) s.json().member("rope_type", "default");
  } else {
    throw_error(cat(s.file().place(s.full("rope.scaling.type")), ": \"", type,
                    "\" is not built, only none, linear and yarn"));
  }
  s.json().end_object();
}

void rope(GgufSettings& s, const Sizes& sizes, double theta = 10000.0, bool partial = false) {
  s.json().key("rope_parameters");
  write_rope(s, sizes, theta, partial);
}

void llama(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rms_norm(s);
  rope(s, sizes);
  s.expect("expert_count", int64_t{0});
  s.expect("expert_used_count", int64_t{0});
  s.json()
      .member("attention_bias", has(s, "blk.0.attn_q.bias"))
      .member("mlp_bias", has(s, "blk.0.ffn_up.bias"));
}

void qwen(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rms_norm(s);
  rope(s, sizes);
}

// -- experts

void experts(GgufSettings& s, const char* count, bool renormalised) {
  s.json()
      .member(count, s.integer("expert_count"))
      .member("num_experts_per_tok", s.integer("expert_used_count"));
  s.expect("expert_weights_norm", renormalised);
  s.expect_number("expert_weights_scale", 1.0);
  s.expect("expert_gating_func", int64_t{1});  // softmax
  s.expect("expert_shared_count", int64_t{has(s, "blk.0.ffn_up_shexp.weight") ? 1 : 0});
}

// The rows of a weight of the first layer, or of one of its experts; 0: there is none.
int64_t rows_of(GgufSettings& s, std::string_view name) {
  const GgufTensor* const tensor = s.file().find_tensor(name);
  if (tensor == nullptr || tensor->shape.size() < 2) return 0;
  return tensor->shape[tensor->shape.size() - 2];
}

void expert_widths(GgufSettings& s) {
  s.json().member("moe_intermediate_size",
                  s.integer("expert_feed_forward_length", rows_of(s, "blk.0.ffn_up_exps.weight")));
}

void mixtral(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rms_norm(s);
  rope(s, sizes);
  experts(s, "num_local_experts", true);
}

void qwen2_moe(GgufSettings& s) {
  qwen(s);
  experts(s, "num_experts", false);
  expert_widths(s);
  s.json()
      .member("shared_expert_intermediate_size", s.integer("expert_shared_feed_forward_length",
                                                           rows_of(s, "blk.0.ffn_up_shexp.weight")))
      .member("norm_topk_prob", false)
      .member("decoder_sparse_step", 1);
}

void qwen3_moe(GgufSettings& s) {
  qwen(s);
  experts(s, "num_experts", true);
  expert_widths(s);
  s.json().member("norm_topk_prob", true).member("decoder_sparse_step", 1);
}

void olmoe(GgufSettings& s) {
  qwen(s);
  experts(s, "num_experts", false);
  s.json().member("norm_topk_prob", false);
}

// -- others

// The kinds of the layers, if the file lists them.
void layer_types(GgufSettings& s, const Sizes& sizes, int64_t pattern) {
  const auto listed = s.find_layers("attention.sliding_window_pattern");
  if (!listed) return s.expect("attention.sliding_window_pattern", pattern);
  MEGATRON_CHECK(std::ssize(*listed) == sizes.layers,
                 s.file().place(s.full("attention.sliding_window_pattern")), ": has ",
                 listed->size(), " elements for ", sizes.layers, " layers");
  s.json().key("layer_types").begin_array();
  for (const int64_t windowed : *listed)
    s.json().value(windowed != 0 ? "sliding_attention" : "full_attention");
  s.json().end_array();
}

// Queries are divided by the root of this, which only newer files hold; it is the size of a head,
// except in the 27B models, which are told apart by their layers.
void query_scale(GgufSettings& s, const Sizes& sizes, int64_t layers_of_27b) {
  double scalar = static_cast<double>(sizes.layers == layers_of_27b ? sizes.hidden / sizes.heads
                                                                    : sizes.head_dim);
  if (const auto scale = s.find_number("attention.scale"); scale && *scale > 0)
    scalar = std::round(1.0 / (*scale * *scale) * 1000.0) / 1000.0;
  s.json().member("query_pre_attn_scalar", scalar);
}

void gemma2(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rms_norm(s);
  rope(s, sizes);
  query_scale(s, sizes, 46);
  s.json()
      .member("sliding_window", s.integer("attention.sliding_window", 4096))
      .member("attn_logit_softcapping", s.number("attn_logit_softcapping", 50.0))
      .member("final_logit_softcapping", s.number("final_logit_softcapping", 30.0));
  layer_types(s, sizes, 2);
}

void gemma3(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rms_norm(s);
  s.json().key("rope_parameters").begin_object().key("full_attention");
  write_rope(s, sizes, 1e6);
  s.json().key("sliding_attention").begin_object().member("rope_type", "default");
  s.json().member("rope_theta", s.number("rope.freq_base_swa", 10000.0)).end_object().end_object();
  query_scale(s, sizes, 62);
  s.json().key("sliding_window");
  if (const auto width = s.find_integer("attention.sliding_window"))
    s.json().value(*width);
  else
    s.json().null();
  if (const auto cap = s.find_number("final_logit_softcapping"))
    s.json().member("final_logit_softcapping", *cap);
  layer_types(s, sizes, 6);
}

void phi3(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rms_norm(s);
  const int64_t original = s.integer("rope.scaling.original_context_length", sizes.context);
  s.json().member("original_max_position_embeddings", original);
  if (const auto width = s.find_integer("attention.sliding_window"); width && *width > 0)
    s.json().member("sliding_window", *width);
  const GgufTensor *const longs = s.file().find_tensor("rope_factors_long.weight"),
                          *const shorts = s.file().find_tensor("rope_factors_short.weight");
  if (longs == nullptr || shorts == nullptr) {
    s.expect_number("rope.scaling.attn_factor", 1.0);
    return rope(s, sizes, 10000.0, /*partial=*/true);
  }
  const std::string type = s.find_text("rope.scaling.type").value_or("longrope");
  MEGATRON_CHECK(type == "longrope", s.file().place(s.full("rope.scaling.type")), ": \"", type,
                 "\" with factors for long contexts is not built, only longrope");
  const int64_t rotated = s.integer("rope.dimension_count", sizes.head_dim);
  s.json()
      .key("rope_parameters")
      .begin_object()
      .member("rope_type", "longrope")
      .member("rope_theta", s.number("rope.freq_base", 10000.0))
      .member("partial_rotary_factor",
              static_cast<double>(rotated) / static_cast<double>(sizes.head_dim))
      .member("long_factor", vector_of(s, *longs))
      .member("short_factor", vector_of(s, *shorts));
  // The factor that follows from the lengths is left out.
  const double ratio = static_cast<double>(sizes.context) / static_cast<double>(original);
  const double usual =
      ratio > 1 ? std::sqrt(1 + std::log(ratio) / std::log(static_cast<double>(original))) : 1.0;
  if (const auto factor = s.find_number("rope.scaling.attn_factor");
      factor && std::abs(*factor / usual - 1) > 1e-6)
    s.json().member("attention_factor", *factor);
  s.json().end_object();
}

void gpt2(GgufSettings& s) {
  const Sizes sizes = read_sizes(s);
  s.json()
      .member("n_embd", sizes.hidden)
      .member("n_layer", sizes.layers)
      .member("n_head", sizes.heads)
      .member("n_positions", sizes.context)
      .member("n_inner", s.integer("feed_forward_length"))
      .member("layer_norm_epsilon", s.number("attention.layer_norm_epsilon"));
  s.expect("attention.head_count_kv", sizes.heads);
}

void gpt_neox(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rope(s, sizes, 10000.0, /*partial=*/true);
  s.json()
      .member("layer_norm_eps", s.number("attention.layer_norm_epsilon"))
      .member("use_parallel_residual", s.find_boolean("use_parallel_residual").value_or(true));
}

void starcoder2(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rope(s, sizes);
  s.json()
      .member("norm_epsilon", s.number("attention.layer_norm_epsilon"))
      .member("use_bias", has(s, "blk.0.attn_q.bias"));
}

const std::vector<GgufArchitecture>& architectures() {
  static const std::vector<GgufArchitecture> table = {
      {.name = "llama",
       .model_type = "llama",
       .names = {kEnds, kPairedAttention, kNormsBefore, kGatedMlp},
       .settings = llama},
      {.name = "llama",
       .experts = true,
       .model_type = "mixtral",
       .names = {kEnds, kPairedAttention, kNormsBefore, kMixtralExperts},
       .settings = mixtral},
      {.name = "qwen2",
       .model_type = "qwen2",
       .names = {kEnds, kAttention, kNormsBefore, kGatedMlp},
       .settings = qwen},
      {.name = "qwen2moe",
       .experts = true,
       .model_type = "qwen2_moe",
       .names = {kEnds, kAttention, kNormsBefore, kGgufExperts},
       .settings = qwen2_moe},
      {.name = "qwen3",
       .model_type = "qwen3",
       .names = {kEnds, kAttention, kNormsBefore, kGatedMlp},
       .settings = qwen},
      {.name = "qwen3moe",
       .experts = true,
       .model_type = "qwen3_moe",
       .names = {kEnds, kAttention, kNormsBefore, kGgufExperts},
       .settings = qwen3_moe},
      {.name = "gemma2",
       .model_type = "gemma2",
       .names = {kGemma, kGatedMlp},
       .settings = gemma2,
       .merges_by_id = true},
      {.name = "gemma3",
       .model_type = "gemma3_text",
       .names = {kGemma, kGatedMlp},
       .settings = gemma3,
       .merges_by_id = true},
      {.name = "phi3",
       .model_type = "phi3",
       .names = {kEnds, kNormsBefore, kGgufPhi3},
       .settings = phi3,
       .strips_after_control = true},
      {.name = "gpt2", .model_type = "gpt2", .names = {kGgufGpt2}, .settings = gpt2},
      {.name = "gptneox", .model_type = "gpt_neox", .names = {kGgufGptNeoX}, .settings = gpt_neox},
      {.name = "starcoder2",
       .model_type = "starcoder2",
       .names = {kEnds, kAttention, kNormsBefore, kGgufStarcoder2Mlp},
       .settings = starcoder2},
      {.name = "olmo2",
       .model_type = "olmo2",
       .names = {kEnds, kAttention, kNormsAfter, kGatedMlp},
       .settings = qwen},
      {.name = "olmoe",
       .experts = true,
       .model_type = "olmoe",
       .names = {kEnds, kAttention, kNormsBefore, kGgufExperts},
       .settings = olmoe},
  };
  return table;
}

}  // namespace
}  // namespace gguf

const GgufArchitecture* find_gguf_architecture(std::string_view name, bool experts) {
  for (const GgufArchitecture& row : gguf::architectures())
    if (row.name == name && row.experts == experts) return &row;
  return nullptr;
}

std::string gguf_architecture_names() {
  std::string names;
  std::string_view last;
  for (const GgufArchitecture& row : gguf::architectures()) {
    if (row.name == last) continue;
    names += cat(names.empty() ? "" : ", ", row.name);
    last = row.name;
  }
  return names;
}

}  // namespace megatron
