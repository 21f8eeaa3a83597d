#include "megatron/interop/gguf/gguf_architectures.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <set>

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

const GgufName kGgufExperts[] = {{"blk.*.ffn_gate_inp", "model.layers.*.mlp.gate"},
                                 {"blk.*.ffn_gate_exps", "model.layers.*.mlp.experts.*.gate_proj"},
                                 {"blk.*.ffn_up_exps", "model.layers.*.mlp.experts.*.up_proj"},
                                 {"blk.*.ffn_down_exps", "model.layers.*.mlp.experts.*.down_proj"}};

const GgufName kGgufGatedSharedExpert[] = {
    {"blk.*.ffn_gate_shexp", "model.layers.*.mlp.shared_expert.gate_proj"},
    {"blk.*.ffn_up_shexp", "model.layers.*.mlp.shared_expert.up_proj"},
    {"blk.*.ffn_down_shexp", "model.layers.*.mlp.shared_expert.down_proj"},
    {"blk.*.ffn_gate_inp_shexp", "model.layers.*.mlp.shared_expert_gate", Form::kOneRow}};

const GgufName kGgufSharedExperts[] = {
    {"blk.*.exp_probs_b.bias", "model.layers.*.mlp.gate.e_score_correction_bias"},
    {"blk.*.ffn_gate_shexp", "model.layers.*.mlp.shared_experts.gate_proj"},
    {"blk.*.ffn_up_shexp", "model.layers.*.mlp.shared_experts.up_proj"},
    {"blk.*.ffn_down_shexp", "model.layers.*.mlp.shared_experts.down_proj"}};

// Older files have kv_b in one tensor.
const GgufName kGgufLatentAttention[] = {
    {"blk.*.attn_q", "model.layers.*.self_attn.q_proj"},
    {"blk.*.attn_q_a", "model.layers.*.self_attn.q_a_proj"},
    {"blk.*.attn_q_a_norm", "model.layers.*.self_attn.q_a_layernorm"},
    {"blk.*.attn_q_b", "model.layers.*.self_attn.q_b_proj"},
    {"blk.*.attn_kv_a_mqa", "model.layers.*.self_attn.kv_a_proj_with_mqa"},
    {"blk.*.attn_kv_a_norm", "model.layers.*.self_attn.kv_a_layernorm"},
    {"blk.*.attn_k_b", "model.layers.*.self_attn.kv_b_proj", Form::kLatentKeys},
    {"blk.*.attn_v_b", "model.layers.*.self_attn.kv_b_proj", Form::kLatentValues},
    {"blk.*.attn_kv_b", "model.layers.*.self_attn.kv_b_proj"},
    {"blk.*.attn_output", "model.layers.*.self_attn.o_proj"}};

const GgufName kNextTokenLayers[] = {
    {"blk.*.nextn.enorm", "model.layers.*.enorm"},
    {"blk.*.nextn.hnorm", "model.layers.*.hnorm"},
    {"blk.*.nextn.eh_proj", "model.layers.*.eh_proj"},
    {"blk.*.nextn.embed_tokens", "model.layers.*.embed_tokens"},
    {"blk.*.nextn.shared_head_norm", "model.layers.*.shared_head.norm"},
    {"blk.*.nextn.shared_head_head", "model.layers.*.shared_head.head"}};

const GgufName kNormsAroundAttention[] = {
    {"blk.*.attn_norm", "model.layers.*.input_layernorm"},
    {"blk.*.post_attention_norm", "model.layers.*.post_attention_layernorm"}};

const GgufName kGgufGptOss[] = {{"blk.*.attn_sinks.weight", "model.layers.*.self_attn.sinks"},
                                {"blk.*.ffn_gate_inp", "model.layers.*.mlp.router"},
                                {"blk.*.ffn_gate_exps", "model.layers.*.mlp.experts.*.gate_proj"},
                                {"blk.*.ffn_up_exps", "model.layers.*.mlp.experts.*.up_proj"},
                                {"blk.*.ffn_down_exps", "model.layers.*.mlp.experts.*.down_proj"}};

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

struct Sizes {
  int64_t hidden = 0, heads = 0, head_dim = 0, context = 0, layers = 0;
};

// Sizes that all architectures have, and the tie; "causal" is what all of them are.
Sizes read_common_sizes(GgufSettings& s) {
  Sizes sizes;
  sizes.hidden = s.integer("embedding_length");
  sizes.layers = s.integer("block_count");
  sizes.heads = s.integer("attention.head_count");
  sizes.context = s.integer("context_length");
  MEGATRON_CHECK(sizes.heads > 0, s.file().place(s.full("attention.head_count")), ": is ",
                 sizes.heads, ", expected 1 or more");
  s.expect("attention.causal", true);
  s.expect("pooling_type", int64_t{0});
  s.find_text("tensor_data_layout");
  s.json()
      .member("vocab_size", vocab_size(s))
      .member("tie_word_embeddings", !has(s, "output.weight"));
  return sizes;
}

Sizes read_sizes(GgufSettings& s) {
  Sizes sizes = read_common_sizes(s);
  sizes.head_dim = s.integer("attention.key_length", sizes.hidden / sizes.heads);
  s.expect("attention.value_length", sizes.head_dim);
  return sizes;
}

// Layers that predict further tokens come after the decoder's and are counted with them; files may
// lack them.
void leave_out_further_layers(GgufSettings& s, Sizes& sizes) {
  const int64_t further = s.integer("nextn_predict_layers", 0);
  MEGATRON_CHECK(further >= 0 && further < std::max<int64_t>(sizes.layers, 1),
                 s.file().place(s.full("nextn_predict_layers")), ": is ", further, " of ",
                 sizes.layers, " layers");
  sizes.layers -= further;
  const bool held = has(s, cat("blk.", sizes.layers, ".nextn.eh_proj.weight"));
  s.json().member("num_nextn_predict_layers", held ? further : 0);
}

// Sizes under the names that most families have for them.
Sizes write_sizes(GgufSettings& s, bool further_layers = false) {
  Sizes sizes = read_sizes(s);
  if (further_layers) leave_out_further_layers(s, sizes);
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

struct RopeForm {
  double theta = 10000.0;
  bool partial = false;  // a part of a head is rotated
  bool rounds = true;    // YaRN's range of frequencies is rounded to whole ones
  bool latent = false;   // its attention is scaled by the lengths, too
};

// Of latent attention. The files hold 0.1 * mscale_all_dim, and mscale is the same.
void write_latent_scale(GgufSettings& s) {
  if (const auto scale = s.find_number("rope.scaling.yarn_log_multiplier")) {
    const double mscale = std::round(*scale * 1e7) / 1e6;
    s.json().member("mscale", mscale).member("mscale_all_dim", mscale);
  }
}

// The members of rope_parameters.
void write_rope(GgufSettings& s, const Sizes& sizes, const RopeForm& form) {
  const double theta = s.number("rope.freq_base", form.theta);
  const bool partial = form.partial;
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
    if (!form.rounds) s.json().member("truncate", false);
    if (form.latent) write_latent_scale(s);
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

void rope(GgufSettings& s, const Sizes& sizes, const RopeForm& form = {}) {
  s.json().key("rope_parameters");
  write_rope(s, sizes, form);
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

void expert_counts(GgufSettings& s, const char* count) {
  s.json()
      .member(count, s.integer("expert_count"))
      .member("num_experts_per_tok", s.integer("expert_used_count"));
}

void experts(GgufSettings& s, const char* count, bool renormalised) {
  expert_counts(s, count);
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

// What DeepSeek and GLM have: dense layers first, shared experts, groups, scaled weights.
void grouped_experts(GgufSettings& s, bool sigmoid) {
  expert_counts(s, "n_routed_experts");
  expert_widths(s);
  s.expect("expert_gating_func", int64_t{sigmoid ? 2 : 1});
  const bool renormalised = s.find_boolean("expert_weights_norm").value_or(false);
  MEGATRON_CHECK(renormalised == sigmoid, s.file().place(s.full("expert_weights_norm")), ": is ",
                 renormalised ? "true" : "false", ", which is not built with ",
                 sigmoid ? "sigmoid scores" : "softmax scores");
  const double scale = s.number("expert_weights_scale", 0.0);
  s.json()
      .member("norm_topk_prob", renormalised)
      .member("routed_scaling_factor", scale == 0.0 ? 1.0 : scale)  // 0: there is none
      .member("n_shared_experts", s.integer("expert_shared_count", 0))
      .member("first_k_dense_replace", s.integer("leading_dense_block_count", 0));
  const int64_t groups = s.integer("expert_group_count", 1);
  const int64_t kept = s.integer("expert_group_used_count", 1);
  if (!sigmoid) s.json().member("topk_method", groups > 1 ? "group_limited_greedy" : "greedy");
  if (sigmoid || groups > 1) s.json().member("n_group", groups).member("topk_group", kept);
}

// With keys and values of all heads in one latent. New files have the sizes of heads under *_mla;
// key_length and value_length are then those of the latent.
void latent_attention(GgufSettings& s, const Sizes& sizes) {
  const bool split = s.find_integer("attention.key_length_mla").has_value();
  const char* const key_name = split ? "attention.key_length_mla" : "attention.key_length";
  const int64_t rotated = s.integer("rope.dimension_count"), key = s.integer(key_name),
                value = s.integer(split ? "attention.value_length_mla" : "attention.value_length"),
                latent = s.integer("attention.kv_lora_rank");
  MEGATRON_CHECK(rotated > 0 && rotated < key, s.file().place(s.full(key_name)), ": is ", key,
                 ", expected more than rope.dimension_count, ", rotated);
  if (split) {
    s.expect("attention.key_length", latent + rotated);
    s.expect("attention.value_length", latent);
  }
  s.expect("attention.head_count_kv", split ? 1 : sizes.heads);
  s.json()
      .member("num_key_value_heads", sizes.heads)
      .member("kv_lora_rank", latent)
      .member("qk_nope_head_dim", key - rotated)
      .member("qk_rope_head_dim", rotated)
      .member("v_head_dim", value)
      .key("q_lora_rank");
  if (const auto rank = s.find_integer("attention.q_lora_rank"))
    s.json().value(*rank);
  else
    s.json().null();
}

void deepseek2(GgufSettings& s, bool sigmoid) {
  Sizes sizes = read_common_sizes(s);
  if (sigmoid) leave_out_further_layers(s, sizes);
  s.json()
      .member("hidden_size", sizes.hidden)
      .member("num_hidden_layers", sizes.layers)
      .member("num_attention_heads", sizes.heads)
      .member("max_position_embeddings", sizes.context)
      .member("intermediate_size", s.integer("feed_forward_length"));
  rms_norm(s);
  latent_attention(s, sizes);
  sizes.head_dim = s.integer("rope.dimension_count");
  rope(s, sizes, {.latent = true});
  grouped_experts(s, sigmoid);
}

void glm4_moe(GgufSettings& s) {
  const Sizes sizes = write_sizes(s, /*further_layers=*/true);
  rms_norm(s);
  rope(s, sizes, {.partial = true});
  grouped_experts(s, /*sigmoid=*/true);
  s.json()
      .member("attention_bias", has(s, "blk.0.attn_q.bias"))
      .member("use_qk_norm", has(s, "blk.0.attn_q_norm.weight"));
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
  write_rope(s, sizes, {.theta = 1e6});
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
    return rope(s, sizes, {.partial = true});
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
  rope(s, sizes, {.partial = true});
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

void gpt_oss(GgufSettings& s) {
  const Sizes sizes = write_sizes(s);
  rms_norm(s);
  rope(s, sizes, {.theta = 150000.0, .rounds = false});
  s.json().member("sliding_window", s.integer("attention.sliding_window"));
  layer_types(s, sizes, 2);
  expert_counts(s, "num_local_experts");
  s.expect("expert_feed_forward_length", s.integer("feed_forward_length"));
  s.expect("expert_gating_func", int64_t{3});  // softmax of the scores that were chosen
}

std::vector<GgufArchitecture> dense_architectures() {
  return {
      {.name = "llama",
       .model_type = "llama",
       .names = {kEnds, kPairedAttention, kNormsBefore, kGatedMlp},
       .settings = llama},
      {.name = "qwen2",
       .model_type = "qwen2",
       .names = {kEnds, kAttention, kNormsBefore, kGatedMlp},
       .settings = qwen},
      {.name = "qwen3",
       .model_type = "qwen3",
       .names = {kEnds, kAttention, kNormsBefore, kGatedMlp},
       .settings = qwen},
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
  };
}

std::vector<GgufArchitecture> expert_architectures() {
  return {
      {.name = "llama",
       .experts = true,
       .model_type = "mixtral",
       .names = {kEnds, kPairedAttention, kNormsBefore, kMixtralExperts},
       .settings = mixtral},
      {.name = "qwen2moe",
       .experts = true,
       .model_type = "qwen2_moe",
       .names = {kEnds, kAttention, kNormsBefore, kGgufExperts, kGgufGatedSharedExpert},
       .settings = qwen2_moe},
      {.name = "qwen3moe",
       .experts = true,
       .model_type = "qwen3_moe",
       .names = {kEnds, kAttention, kNormsBefore, kGgufExperts},
       .settings = qwen3_moe},
      {.name = "olmoe",
       .experts = true,
       .model_type = "olmoe",
       .names = {kEnds, kAttention, kNormsBefore, kGgufExperts},
       .settings = olmoe},
      {.name = "deepseek2",
       .experts = true,
       .gating = 2,
       .model_type = "deepseek_v3",
       .names = {kEnds, kGgufLatentAttention, kNormsBefore, kGatedMlp, kGgufExperts,
                 kGgufSharedExperts, kNextTokenLayers},
       .settings = [](GgufSettings& s) { deepseek2(s, /*sigmoid=*/true); }},
      {.name = "deepseek2",
       .experts = true,
       .model_type = "deepseek_v2",
       .names = {kEnds, kGgufLatentAttention, kNormsBefore, kGatedMlp, kGgufExperts,
                 kGgufSharedExperts},
       .settings = [](GgufSettings& s) { deepseek2(s, /*sigmoid=*/false); }},
      {.name = "glm4moe",
       .experts = true,
       .model_type = "glm4_moe",
       .names = {kEnds, kAttention, kNormsAroundAttention, kGatedMlp, kGgufExperts,
                 kGgufSharedExperts, kNextTokenLayers},
       .settings = glm4_moe},
      {.name = "gpt-oss",
       .experts = true,
       .model_type = "gpt_oss",
       .names = {kEnds, kAttention, kNormsAroundAttention, kGgufGptOss},
       .settings = gpt_oss},
  };
}

const std::vector<GgufArchitecture>& architectures() {
  static const std::vector<GgufArchitecture> table = [] {
    std::vector<GgufArchitecture> all = dense_architectures();
    std::ranges::move(expert_architectures(), std::back_inserter(all));
    return all;
  }();
  return table;
}

}  // namespace
}  // namespace gguf

const GgufArchitecture* find_gguf_architecture(std::string_view name, bool experts,
                                               int64_t gating) {
  for (const GgufArchitecture& row : gguf::architectures())
    if (row.name == name && row.experts == experts && (row.gating == 0 || row.gating == gating))
      return &row;
  return nullptr;
}

std::string gguf_architecture_names() {
  std::string names;
  std::set<std::string_view> listed;
  for (const GgufArchitecture& row : gguf::architectures())
    if (listed.insert(row.name).second) names += cat(names.empty() ? "" : ", ", row.name);
  return names;
}

}  // namespace megatron
