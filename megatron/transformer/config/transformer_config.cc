#include "megatron/transformer/config/transformer_config.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {
namespace {

constexpr std::string_view kPositions[] = {"learned_absolute", "rope", "none", "yarn"};
constexpr std::string_view kRopeScalings[] = {"none", "linear", "llama3", "yarn", "longrope"};
constexpr std::string_view kNormPlacements[] = {"pre", "post", "sandwich"};
constexpr std::string_view kNorms[] = {"LayerNorm", "RMSNorm"};
constexpr std::string_view kFusions[] = {"native", "te", "linear"};
constexpr std::string_view kBackends[] = {"auto", "flash", "fused", "unfused", "local"};
constexpr std::string_view kGranularities[] = {"none", "full", "selective"};
constexpr std::string_view kMethods[] = {"uniform", "block"};
constexpr std::string_view kFp8Formats[] = {"none", "e4m3", "hybrid"};
constexpr std::string_view kFp8Recipes[] = {"delayed", "tensorwise", "blockwise", "mxfp8",
                                            "custom"};
constexpr std::string_view kAmaxAlgorithms[] = {"most_recent", "max"};
constexpr std::string_view kFp4Formats[] = {"none", "e2m1"};
constexpr std::string_view kFp4Recipes[] = {"nvfp4", "custom"};
constexpr std::string_view kContextParallelTypes[] = {"p2p", "all_gather", "a2a", "a2a+p2p"};

std::optional<ContextParallelType> parse_context_parallel_type(const std::string& text) {
  const auto* found =
      std::find(std::begin(kContextParallelTypes), std::end(kContextParallelTypes), text);
  if (found == std::end(kContextParallelTypes)) return std::nullopt;
  return static_cast<ContextParallelType>(found - std::begin(kContextParallelTypes));
}

// Values of --recompute-modules that are built, and those of layers that are not built.
constexpr std::string_view kRecomputeModules[] = {"core_attn", "layernorm", "mlp", "mlp_act"};
constexpr std::pair<std::string_view, std::string_view> kLaterRecomputeModules[] = {
    {"moe_act", "mixture of experts"},         {"moe", "mixture of experts"},
    {"shared_experts", "mixture of experts"},  {"mla_up_proj", "multi-latent attention"},
    {"gdn_norm_out", "gated-delta attention"}, {"gdp_in_proj", "gated-delta attention"},
    {"gdp_qkv", "gated-delta attention"},      {"mhc", "multi-stream residual connections"}};

template <class List>
bool is_one_of(std::string_view name, const List& list) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

// " waits for X, which is not built" for values that Megatron has, else " is not known".
template <class List>
std::string why_unknown(std::string_view name, const List& later) {
  for (const auto& [known, what] : later)
    if (known == name) return cat(" waits for ", what, ", which is not built yet");
  return " is not known";
}

constexpr std::string_view kOffloadModules[] = {"attn_norm", "qkv_linear", "core_attn", "attn_proj",
                                                "mlp_norm",  "mlp_fc1",    "mlp_act",   "mlp_fc2"};
constexpr std::pair<std::string_view, std::string_view> kLaterOffloadModules[] = {
    {"expert_fc1", "mixture of experts"},
    {"moe_act", "mixture of experts"},
    {"fused_group_mlp", "mixture of experts"},
    {"gdp_qkv", "gated-delta attention"}};

// Why the input of this part of a layer is not saved at all, or empty.
std::string_view why_not_saved(const TransformerConfig& c, std::string_view module) {
  const bool inputs_alone = c.recompute_granularity == RecomputeGranularity::kFull &&
                            c.recompute_method == RecomputeMethod::kUniform;
  if (inputs_alone && module != "attn_norm")
    return "--recompute-granularity full saves only the inputs of layers, attn_norm";
  const bool inside_mlp = module == "mlp_fc1" || module == "mlp_act" || module == "mlp_fc2";
  if (inside_mlp && c.recomputes("mlp"))
    return "--recompute-modules mlp saves only its input, mlp_norm";
  if ((module == "qkv_linear" || module == "mlp_fc1") && c.recomputes("layernorm"))
    return "--recompute-modules layernorm does not save it";
  if (module == "mlp_fc2" && c.recomputes("mlp_act"))
    return "--recompute-modules mlp_act does not save it";
  return {};
}

template <class Require>
void validate_offloading(const TransformerConfig& c, const Require& require) {
  const bool fine = c.fine_grained_activation_offloading;
  require(!fine || !c.offload_modules.empty(),
          "--fine-grained-activation-offloading is given without --offload-modules",
          "for example --offload-modules core_attn attn_proj mlp_act mlp_fc2");
  require(fine || c.offload_modules.empty(),
          "--offload-modules needs --fine-grained-activation-offloading");
  for (const std::string& module : c.offload_modules) {
    require(is_one_of(module, kOffloadModules),
            cat("--offload-modules ", module, why_unknown(module, kLaterOffloadModules)),
            "modules: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, mlp_fc1, mlp_act, "
            "mlp_fc2");
    const std::string_view reason = why_not_saved(c, module);
    require(!fine || !is_one_of(module, kOffloadModules) || reason.empty(),
            cat("--offload-modules ", module, " has no effect: ", reason), "leave it out");
  }
  require(c.min_offloaded_tensor_size >= 0,
          cat("--min-offloaded-tensor-size ", c.min_offloaded_tensor_size, " is negative"));
  require(
      c.activation_offload_fraction > 0 && c.activation_offload_fraction <= 1,
      cat("--activation-offload-fraction ", c.activation_offload_fraction, " is outside (0, 1]"));
  require(
      fine || c.activation_offload_fraction == 1.0,
      "--activation-offload-fraction has an effect only with --fine-grained-activation-offloading");
  require(c.fine_grained_offloading_max_inflight_offloads >= 1,
          cat("--fine-grained-offloading-max-inflight-offloads ",
              c.fine_grained_offloading_max_inflight_offloads, " must be positive"));
  require(!c.distribute_saved_activations || !c.offloads_activations(),
          "--distribute-saved-activations is not built together with offloading",
          "give one of them");
  const int64_t layers = c.cpu_offloading_num_layers;
  require(layers >= 0 && (layers == 0 || layers < c.num_layers),
          cat("--cpu-offloading-num-layers ", layers, ": expected 0 to ", c.num_layers - 1));
  require(layers == 0 || !fine,
          "--cpu-offloading-num-layers and --fine-grained-activation-offloading are both given",
          "give one of them");
  require(layers == 0 || c.recompute_granularity == RecomputeGranularity::kNone,
          "--cpu-offloading-num-layers cannot be combined with recomputation",
          "give --fine-grained-activation-offloading with --offload-modules");
}

// "[1,0,1]": 1 marks a windowed layer. Megatron's expressions such as "([1]*3+[0])*2" are refused.
std::optional<std::vector<int64_t>> parse_list(const std::string& text) {
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') return std::nullopt;
  std::vector<int64_t> values;
  for (size_t i = 1; i + 1 < text.size(); ++i) {
    const char c = text[i];
    if (c == '0' || c == '1')
      values.push_back(c - '0');
    else if (c != ',' && c != ' ')
      return std::nullopt;
  }
  return values;
}

}  // namespace

void TransformerConfig::fields(FieldVisitor& v) {
  v.group("network size");
  v.field("num_layers", num_layers, "number of transformer layers");
  v.field("hidden_size", hidden_size, "width of the residual stream");
  v.field("ffn_hidden_size", ffn_hidden_size,
          "width of the MLP; 0: 4 * hidden_size, or 8/3 of it rounded down to 64 with --swiglu");
  v.field("num_attention_heads", num_attention_heads, "number of query heads");
  v.field("group_query_attention", group_query_attention,
          "share keys and values among groups of heads");
  v.field("num_query_groups", num_query_groups,
          "number of key/value heads with --group-query-attention");
  v.field("kv_channels", kv_channels, "width of one head; 0: hidden_size / num_attention_heads");
  v.field("seq_length", seq_length, "tokens per sample");
  v.field("max_position_embeddings", max_position_embeddings, "longest position; 0: seq_length");
  v.field("untie_embeddings_and_output_weights", untie_embeddings_and_output_weights,
          "give the output layer its own weight");
  v.group("network behavior");
  v.choice("position_embedding_type", position_embedding_type, kPositions, "how positions enter");
  v.field("use_rotary_position_embeddings", use_rotary_position_embeddings,
          "old spelling of --position-embedding-type rope");
  v.field(
      {"add_position_embedding", "--no-position-embedding", true}, add_position_embedding,
      "no learned positions: --position-embedding-type none where it would be learned_absolute");
  v.field("rotary_base", rotary_base, "base of the rotary frequencies");
  v.field("rotary_percent", rotary_percent, "fraction of each head that is rotated");
  v.field("rotary_interleaved", rotary_interleaved, "rotate neighbouring pairs instead of halves");
  v.field("rotary_seq_len_interpolation_factor", rotary_seq_len_interpolation_factor,
          "divide positions by this");
  v.field("rotary_base_local", rotary_base_local,
          "base of the rotary frequencies in windowed layers, which are then not scaled; none: as "
          "in all");
  v.field("use_rope_scaling", use_rope_scaling,
          "scale rotary frequencies as Llama 3.1 does: --rope-scaling-type llama3");
  v.choice(
      "rope_scaling_type", rope_scaling_type, kRopeScalings,
      "how rotary frequencies are stretched for sequences longer than the model was trained on");
  v.field("rope_scaling_factor", rope_scaling_factor,
          "factor of linear, llama3, yarn and longrope scaling");
  v.field({"rope_original_max_position_embeddings",
           "--rope-original-max-position-embeddings --yarn-original-max-position-embeddings"},
          rope_original_max_position_embeddings,
          "length that the model was trained on before llama3, yarn or longrope scaling");
  v.field("rope_low_freq_factor", rope_low_freq_factor,
          "llama3: wavelengths above the original length over this are scaled");
  v.field("rope_high_freq_factor", rope_high_freq_factor,
          "llama3: wavelengths below the original length over this are kept");
  v.field("yarn_beta_fast", yarn_beta_fast,
          "yarn: frequencies with more turns in the original length are kept");
  v.field("yarn_beta_slow", yarn_beta_slow,
          "yarn: frequencies with fewer turns in the original length are scaled");
  v.field("yarn_correction_range_round_to_int", yarn_correction_range_round_to_int,
          "yarn: round the bounds of the range between kept and scaled frequencies");
  v.field("longrope_short_factor", longrope_short_factor,
          "longrope: divisor of each rotary frequency up to the original length");
  v.field("longrope_long_factor", longrope_long_factor,
          "longrope: divisor of each rotary frequency beyond the original length");
  v.field("rope_attention_factor", rope_attention_factor,
          "yarn and longrope: factor of cosines and sines; none: from the scaling factor");
  v.choice("normalization", normalization, kNorms, "norm of every layer");
  v.field({"layernorm_epsilon", "--norm-epsilon --layernorm-epsilon"}, layernorm_epsilon,
          "added to the variance");
  v.field({"layernorm_zero_centered_gamma", "--apply-layernorm-1p"}, layernorm_zero_centered_gamma,
          "store norm weights as their difference from 1");
  v.field({"add_bias_linear", "--disable-bias-linear", true}, add_bias_linear,
          "no biases in linear layers");
  v.field("add_qkv_bias", add_qkv_bias, "biases in the query, key and value projection only");
  v.field("qk_layernorm", qk_layernorm, "normalise queries and keys per head");
  v.field(
      "qk_layernorm_over_heads", qk_layernorm_over_heads,
      "with --qk-layernorm: one RMS over all heads of a token instead of one per head (OLMo 2)");
  v.choice("norm_placement", norm_placement, kNormPlacements,
           "normalise the input of attention and MLP (pre), their output before it is added "
           "(post), or both "
           "(sandwich)");
  v.field("parallel_residual", parallel_residual,
          "attention and MLP both read the layer's input: x + attention(norm(x)) + mlp(norm(x))");
  v.field("scale_embeddings", scale_embeddings,
          "multiply embeddings by the square root of hidden_size");
  v.field("query_pre_attn_scalar", query_pre_attn_scalar,
          "divide attention scores by the square root of this instead of kv_channels'");
  v.field("attn_logit_softcapping", attn_logit_softcapping,
          "bound attention scores smoothly: c tanh(score / c); 0: not. Uses unfused attention");
  v.field("final_logit_softcapping", final_logit_softcapping,
          "bound the model's logits smoothly: c tanh(logit / c); 0: not");
  v.field("window_size", window_size, "sliding window: tokens to the left and to the right");
  v.field("window_attn_skip_freq", window_attn_skip_freq,
          "every n-th layer attends fully, or a list such as [1,1,0] with 1 for windowed layers");
  v.field("swiglu", swiglu, "silu(gate) * up in the MLP");
  v.field("geglu", geglu, "gelu(gate) * up in the MLP");
  v.field("quick_geglu", quick_geglu, "gate * sigmoid(1.702 gate) * (up + offset) in the MLP");
  v.field("squared_relu", squared_relu, "relu(x)^2 in the MLP");
  v.field("openai_gelu", openai_gelu, "the tanh approximation of GELU");
  v.field(
      {"bias_gelu_fusion", "--no-bias-gelu-fusion", true}, bias_gelu_fusion,
      "exact GELU although linears have biases (the fused kernel computes the tanh approximation)");
  v.field("glu_linear_offset", glu_linear_offset, "offset of --quick-geglu");
  v.field("fp32_residual_connection", fp32_residual_connection, "keep the residual stream in fp32");
  v.field("z_loss_coeff", z_loss_coeff,
          "weight of the squared log-partition added to each token's loss");
  v.group("regularization");
  v.field("hidden_dropout", hidden_dropout,
          "dropout of embeddings and of each branch before the residual");
  v.field("attention_dropout", attention_dropout, "dropout of attention probabilities");
  v.group("low precision");
  v.choice(
      "fp8_format", fp8_format, kFp8Formats,
      "multiply in FP8 in the linears of layers: e4m3, or hybrid with E5M2 for output gradients");
  v.choice("fp8_recipe", fp8_recipe, kFp8Recipes,
           "scales: delayed (of earlier steps), tensorwise (of the tensor itself), blockwise (per "
           "128 elements, per "
           "128 x 128 of a weight)");
  v.field("fp8_margin", fp8_margin, "delayed scaling: divide scales by 2 to this power");
  v.field("fp8_amax_history_len", fp8_amax_history_len,
          "delayed scaling: steps whose largest values are remembered");
  v.choice(
      "fp8_amax_compute_algo", fp8_amax_compute_algo, kAmaxAlgorithms,
      "delayed scaling: scale by the last step's largest value, or by the largest of the history");
  v.field({"fp8_wgrad", "--no-fp8-wgrad --disable-fp8-wgrad", true}, fp8_wgrad,
          "multiply weight gradients in the model's type");
  v.choice("fp4_format", fp4_format, kFp4Formats,
           "round the operands of the linears of layers to FP4; emulated, to study its loss: "
           "slower than bf16");
  v.choice("fp4_recipe", fp4_recipe, kFp4Recipes,
           "nvfp4: E2M1 with an E4M3 scale per 16 elements and an fp32 scale per tensor");
  v.field("first_last_layers_bf16", first_last_layers_bf16,
          "keep the first and the last layers out of FP8 or FP4");
  v.field("num_layers_at_start_in_bf16", num_layers_at_start_in_bf16,
          "with --first-last-layers-bf16: layers at the start");
  v.field("num_layers_at_end_in_bf16", num_layers_at_end_in_bf16,
          "with --first-last-layers-bf16: layers at the end");
  v.group("adapters");
  v.field("lora_rank", lora_rank,
          "train low-rank adapters (LoRA) of this rank in place of the weights; 0: no adapters");
  v.field("lora_alpha", lora_alpha,
          "what adapters add is multiplied by this over the rank; none: the rank");
  v.field("lora_targets", lora_targets,
          "linears with adapters: linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate, "
          "linear_fc1_up, linear_fc2 "
          "(q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj mean the same), "
          "linear_qkv and linear_fc1 (one adapter for all rows); empty or all-linear: each part of "
          "every linear");
  v.group("RNG and initialization");
  v.field("init_method_std", init_method_std, "standard deviation of weights");
  v.field("embedding_init_method_std", embedding_init_method_std,
          "standard deviation of embeddings");
  v.field("init_method_xavier_uniform", init_method_xavier_uniform, "Xavier-uniform weights");
  v.field("seed", seed, "seed of weights, dropout and data order");
  v.group("attention and recomputation");
  v.choice("cross_entropy_fusion_impl", cross_entropy_fusion_impl, kFusions,
           "linear: the output projection and the loss take some tokens at a time, and logits of a "
           "micro-batch never exist");
  v.field("cross_entropy_chunk_tokens", cross_entropy_chunk_tokens,
          "tokens at a time with --cross-entropy-fusion-impl linear; 0: as many as have 1 GiB of "
          "logits");
  v.field("fast", fast,
          "faster kernels whose bits differ from run to run: the backward of cuDNN's attention");
  v.choice("attention_backend", attention_backend, kBackends,
           "implementation of core attention; fused is cuDNN");
  v.choice("recompute_granularity", recompute_granularity, kGranularities,
           "recompute activations in the backward: whole layers or selected parts");
  v.choice("recompute_method", recompute_method, kMethods,
           "which layers full recomputation covers");
  v.field("recompute_num_layers", recompute_num_layers,
          "uniform: layers per recomputed unit; block: number of layers recomputed");
  v.field("recompute_modules", recompute_modules,
          "parts for selective recomputation: core_attn, layernorm, mlp (all of it, from its "
          "input), mlp_act (the output "
          "of its activation)");
  v.field("recompute_activations", recompute_activations,
          "short for --recompute-granularity selective");
  v.field("distribute_saved_activations", distribute_saved_activations,
          "full recomputation: each tensor-parallel rank keeps a part of a saved input; the "
          "backward gathers them");
  v.field("fine_grained_activation_offloading", fine_grained_activation_offloading,
          "keep the activations of --offload-modules in host memory between forward and backward");
  v.field("offload_modules", offload_modules,
          "whose inputs are offloaded: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, "
          "mlp_fc1, mlp_act, mlp_fc2");
  v.field("min_offloaded_tensor_size", min_offloaded_tensor_size,
          "tensors of fewer elements are not offloaded");
  v.field("activation_offload_fraction", activation_offload_fraction,
          "part of the layers of a pipeline chunk that --fine-grained-activation-offloading "
          "covers, from the first");
  v.field(
      "fine_grained_offloading_max_inflight_offloads",
      fine_grained_offloading_max_inflight_offloads,
      "half layers that may be on their way to the host before computation waits for one of them");
  v.field("cpu_offloading_num_layers", cpu_offloading_num_layers,
          "keep all that the first layers save in host memory");
  v.field(
      "cp_comm_type", cp_comm_type,
      "how the ranks of a sequence exchange keys and values: p2p, all_gather, a2a or a2a+p2p, for "
      "all layers or for each; nothing to exchange at one context-parallel rank");
}

void TransformerConfig::finalize() {
  if (recompute_activations && recompute_granularity == RecomputeGranularity::kNone)
    recompute_granularity = RecomputeGranularity::kSelective;
  if (use_rotary_position_embeddings) position_embedding_type = PositionEmbedding::kRope;
  if (!add_position_embedding && position_embedding_type == PositionEmbedding::kLearnedAbsolute)
    position_embedding_type = PositionEmbedding::kNone;
  if (position_embedding_type == PositionEmbedding::kYarn) {
    position_embedding_type = PositionEmbedding::kRope;
    if (rope_scaling_type == RopeScaling::kNone) rope_scaling_type = RopeScaling::kYarn;
  }
  if (use_rope_scaling && rope_scaling_type == RopeScaling::kNone)
    rope_scaling_type = RopeScaling::kLlama3;
  if (ffn_hidden_size == 0)
    ffn_hidden_size = swiglu ? hidden_size * 8 / 3 / 64 * 64 : 4 * hidden_size;
  if (kv_channels == 0 && num_attention_heads > 0) kv_channels = hidden_size / num_attention_heads;
  if (max_position_embeddings == 0) max_position_embeddings = seq_length;
  if (recompute_granularity == RecomputeGranularity::kSelective && recompute_modules.empty())
    recompute_modules = {"core_attn"};
  if (lora_rank > 0) {
    if (!lora_alpha) lora_alpha = static_cast<double>(lora_rank);
    lora_targets = written_out_lora_targets(lora_targets, is_gated(activation()));
  }
}

void TransformerConfig::validate(Violations& violations) const {
  const auto require = [&](bool ok, std::string message, std::string hint = {}) {
    if (!ok) violations.add(std::move(message), std::move(hint));
  };
  const auto positive = [&](const char* flag, int64_t value) {
    require(value > 0,
            value == 0 ? cat(flag, " is required and must be positive") : cat(flag, " is ", value),
            value == 0 ? "" : "1 or more");
  };
  positive("--num-layers", num_layers);
  positive("--hidden-size", hidden_size);
  positive("--num-attention-heads", num_attention_heads);
  positive("--seq-length", seq_length);
  if (num_layers <= 0 || hidden_size <= 0 || num_attention_heads <= 0 || seq_length <= 0) return;
  require(
      kv_channels > 0 && (kv_channels * num_attention_heads == hidden_size ||
                          hidden_size % num_attention_heads == 0 ||
                          kv_channels != hidden_size / num_attention_heads),
      cat("--hidden-size ", hidden_size, " is not divisible by --num-attention-heads ",
          num_attention_heads),
      cat("give --kv-channels, or a number of heads that divides: ", format_divisors(hidden_size)));
  require(kv_channels % 2 == 0 || position_embedding_type != PositionEmbedding::kRope,
          cat("--kv-channels ", kv_channels, " is odd, rotary embeddings need an even width"));
  require(ffn_hidden_size > 0, cat("--ffn-hidden-size ", ffn_hidden_size, " must be positive"));
  if (group_query_attention)
    require(num_query_groups > 0 && num_attention_heads % num_query_groups == 0,
            cat("--num-attention-heads ", num_attention_heads,
                " is not divisible by --num-query-groups ", num_query_groups),
            cat("groups that divide it: ", format_divisors(num_attention_heads)));
  require(max_position_embeddings >= seq_length,
          cat("--max-position-embeddings ", max_position_embeddings, " is below --seq-length ",
              seq_length));
  require(rotary_percent > 0 && rotary_percent <= 1,
          cat("--rotary-percent ", rotary_percent, " is outside (0, 1]"));
  require(position_embedding_type != PositionEmbedding::kRope || kv_channels % 2 != 0 ||
              rotary_width() % 2 == 0,
          cat("--rotary-percent ", rotary_percent, " of --kv-channels ", kv_channels, " rotates ",
              rotary_width(), " features, an even number is needed"));
  require(rope_scaling_factor > 0,
          cat("--rope-scaling-factor ", rope_scaling_factor, " must be positive"));
  validate_rope_scaling(violations);
  validate_lora(violations);
  require(!rotary_base_local || *rotary_base_local > 0,
          cat("--rotary-base-local ", rotary_base_local.value_or(0), " must be positive"));
  require(!rotary_base_local || !window_size.empty(),
          "--rotary-base-local has an effect only with --window-size");
  require(!qk_layernorm_over_heads || (qk_layernorm && normalization == Normalization::kRMSNorm),
          "--qk-layernorm-over-heads needs --qk-layernorm and --normalization RMSNorm");
  require(norm_placement != NormPlacement::kPost || !fp32_residual_connection,
          "--norm-placement post with --fp32-residual-connection is not built");
  require(!parallel_residual || norm_placement == NormPlacement::kPre,
          "--parallel-residual with norms on the output of branches is not built",
          "--norm-placement pre");
  require(
      !parallel_residual || !(recomputes("mlp") || fine_grained_activation_offloading ||
                              cpu_offloading_num_layers > 0),
      "--parallel-residual with --recompute-modules mlp or offloading of activations is not built");
  require(!query_pre_attn_scalar || *query_pre_attn_scalar > 0,
          cat("--query-pre-attn-scalar ", query_pre_attn_scalar.value_or(0), " must be positive"));
  require(attn_logit_softcapping >= 0,
          cat("--attn-logit-softcapping ", attn_logit_softcapping, " is negative"), "0: none");
  require(final_logit_softcapping >= 0,
          cat("--final-logit-softcapping ", final_logit_softcapping, " is negative"), "0: none");
  require(attn_logit_softcapping == 0 || (attention_backend != AttentionBackend::kFlash &&
                                          attention_backend != AttentionBackend::kFused),
          "--attention-backend flash and fused do not compute --attn-logit-softcapping",
          "--attention-backend auto");
  require(rotary_base > 0, cat("--rotary-base ", rotary_base, " must be positive"));
  require(!rotary_seq_len_interpolation_factor || *rotary_seq_len_interpolation_factor > 0,
          "--rotary-seq-len-interpolation-factor must be positive");
  require(swiglu + geglu + quick_geglu + squared_relu + openai_gelu <= 1,
          "more than one activation given",
          "use one of --swiglu, --geglu, --quick-geglu, --squared-relu, --openai-gelu");
  require(glu_linear_offset == 0.0 || quick_geglu,
          "--glu-linear-offset has an effect only with --quick-geglu");
  require(hidden_dropout >= 0 && hidden_dropout < 1,
          cat("--hidden-dropout ", hidden_dropout, " is outside [0, 1)"));
  require(attention_dropout >= 0 && attention_dropout < 1,
          cat("--attention-dropout ", attention_dropout, " is outside [0, 1)"));
  require(layernorm_epsilon > 0, cat("--norm-epsilon ", layernorm_epsilon, " must be positive"));
  require(init_method_std > 0, cat("--init-method-std ", init_method_std, " must be positive"));
  require(!embedding_init_method_std || *embedding_init_method_std > 0,
          cat("--embedding-init-method-std ", embedding_init_method_std.value_or(0),
              " must be positive"));
  require(cross_entropy_chunk_tokens >= 0,
          cat("--cross-entropy-chunk-tokens ", cross_entropy_chunk_tokens, " is negative"));
  require(
      cross_entropy_fusion_impl != CrossEntropyFusion::kLinear || final_logit_softcapping == 0.0,
      "--cross-entropy-fusion-impl linear with --final-logit-softcapping is not built");
  require(z_loss_coeff >= 0, cat("--z-loss-coeff ", z_loss_coeff, " is negative"));
  require(seed > 0, cat("--seed ", seed, " must be positive"));
  require(window_size.empty() || window_size.size() == 2,
          cat("--window-size takes two values (left, right), got ", window_size.size()));
  for (int64_t w : window_size)
    require(w >= -1, cat("--window-size ", w, ": expected -1 (no limit) or more"));
  require(window_attn_skip_freq.empty() || !window_size.empty(),
          "--window-attn-skip-freq has an effect only with --window-size");
  if (!window_attn_skip_freq.empty()) {
    const auto list = parse_list(window_attn_skip_freq);
    const std::string& text = window_attn_skip_freq;
    const bool number = text.find_first_not_of("0123456789") == std::string::npos &&
                        text[0] != '0' && text.size() < 10;
    require(number || (list && static_cast<int64_t>(list->size()) == num_layers),
            cat("--window-attn-skip-freq ", window_attn_skip_freq,
                ": expected a positive integer, or a list of ", num_layers, " zeros and ones"));
  }
  require(recompute_num_layers > 0 && recompute_num_layers <= num_layers,
          cat("--recompute-num-layers ", recompute_num_layers, ": expected 1 to ", num_layers));
  require(recompute_modules.empty() || recompute_granularity == RecomputeGranularity::kSelective,
          "--recompute-modules needs --recompute-granularity selective");
  for (const std::string& module : recompute_modules)
    require(is_one_of(module, kRecomputeModules),
            cat("--recompute-modules ", module, why_unknown(module, kLaterRecomputeModules)),
            "parts: core_attn, layernorm, mlp, mlp_act");
  require(!recomputes("mlp") || !recomputes("mlp_act"),
          "--recompute-modules mlp_act has no effect together with mlp",
          "mlp recomputes the activation too; give one of them");
  require(!recompute_activations || recompute_granularity != RecomputeGranularity::kFull,
          "--recompute-activations asks for selective recomputation, but --recompute-granularity "
          "is full",
          "give one of them");
  require(!distribute_saved_activations || recompute_granularity == RecomputeGranularity::kFull,
          "--distribute-saved-activations needs --recompute-granularity full");
  validate_offloading(*this, require);
  validate_quantization(violations);
  require(cp_comm_type.size() == 1 || static_cast<int64_t>(cp_comm_type.size()) == num_layers,
          cat("--cp-comm-type has ", cp_comm_type.size(), " values, expected 1 or one per layer, ",
              num_layers));
  for (const std::string& type : cp_comm_type)
    require(parse_context_parallel_type(type).has_value(),
            cat("--cp-comm-type ", type, " is not known"), "types: p2p, all_gather, a2a, a2a+p2p");
}

void TransformerConfig::validate_quantization(Violations& violations) const {
  const auto require = [&](bool ok, std::string message, std::string hint = {}) {
    if (!ok) violations.add(std::move(message), std::move(hint));
  };
  const bool fp8 = fp8_format != Fp8Format::kNone, fp4 = fp4_format != Fp4Format::kNone;
  require(!fp8 || !fp4, "--fp8-format and --fp4-format are both given", "give one of them");
  require(fp8 || fp8_recipe == Fp8Recipe::kDelayed, "--fp8-recipe is given without --fp8-format",
          "--fp8-format hybrid, or e4m3");
  require(fp8_recipe != Fp8Recipe::kMxfp8,
          "--fp8-recipe mxfp8 needs the scaled products of Blackwell GPUs and is not built",
          "recipes for Hopper: tensorwise, delayed, blockwise");
  require(fp8_recipe != Fp8Recipe::kCustom,
          "--fp8-recipe custom loads quantisers from Python, which does not run here",
          "recipes: tensorwise, delayed, blockwise");
  require(fp4_recipe != Fp4Recipe::kCustom,
          "--fp4-recipe custom loads quantisers from Python, which does not run here",
          "--fp4-recipe nvfp4");
  const bool delayed = fp8 && fp8_recipe == Fp8Recipe::kDelayed;
  const auto needs_delayed = [&](const char* flag, bool given) {
    require(delayed || !given,
            cat(flag, " has an effect only with --fp8-format and --fp8-recipe delayed"),
            "leave it out");
  };
  needs_delayed("--fp8-margin", fp8_margin != 0);
  needs_delayed("--fp8-amax-history-len", fp8_amax_history_len != 1);
  needs_delayed("--fp8-amax-compute-algo", fp8_amax_compute_algo != AmaxAlgorithm::kMostRecent);
  require(fp8_margin >= 0 && fp8_margin <= 16,
          cat("--fp8-margin ", fp8_margin, " is outside 0 to 16"));
  require(fp8_amax_history_len >= 1 && fp8_amax_history_len <= 65536,
          cat("--fp8-amax-history-len ", fp8_amax_history_len, " is outside 1 to 65536 steps"));
  require(fp8 || fp4 || fp8_wgrad,
          "--no-fp8-wgrad has an effect only with --fp8-format or --fp4-format", "leave it out");
  require(fp8 || fp4 || !first_last_layers_bf16,
          "--first-last-layers-bf16 has an effect only with --fp8-format or --fp4-format",
          "leave it out");
  const int64_t start = num_layers_at_start_in_bf16, end = num_layers_at_end_in_bf16;
  require(start >= 0 && end >= 0,
          cat("--num-layers-at-start-in-bf16 ", start, " and --num-layers-at-end-in-bf16 ", end,
              " must not be negative"));
  require(first_last_layers_bf16 || (start == 1 && end == 1),
          "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 have an effect only with "
          "--first-last-layers-bf16");
  require(!first_last_layers_bf16 || start + end < num_layers,
          cat("--num-layers-at-start-in-bf16 ", start, " and --num-layers-at-end-in-bf16 ", end,
              " leave none of --num-layers ", num_layers, " to quantise"));
}

QuantizationOptions TransformerConfig::quantization(int64_t layer_number) const {
  QuantizationOptions options;
  const bool edge =
      first_last_layers_bf16 && (layer_number <= num_layers_at_start_in_bf16 ||
                                 layer_number > num_layers - num_layers_at_end_in_bf16);
  if (!is_quantized() || edge) return options;
  options.weight_gradient = fp8_wgrad;
  options.hybrid = fp8_format == Fp8Format::kHybrid;
  if (fp4_format != Fp4Format::kNone) {
    options.recipe = QuantizationRecipe::kNvfp4;
  } else if (fp8_recipe == Fp8Recipe::kTensorwise) {
    options.recipe = QuantizationRecipe::kTensorwise;
  } else if (fp8_recipe == Fp8Recipe::kBlockwise) {
    options.recipe = QuantizationRecipe::kBlockwise;
  } else {
    options.recipe = QuantizationRecipe::kDelayed;
    options.delayed = {fp8_amax_history_len, fp8_amax_compute_algo == AmaxAlgorithm::kMostRecent,
                       fp8_margin, options.type(OperandRole::kGradient)};
  }
  return options;
}

void TransformerConfig::remove_quantization() {
  fp8_format = Fp8Format::kNone;
  fp8_recipe = Fp8Recipe::kDelayed;
  fp8_margin = 0;
  fp8_amax_history_len = 1;
  fp8_amax_compute_algo = AmaxAlgorithm::kMostRecent;
  fp8_wgrad = true;
  fp4_format = Fp4Format::kNone;
  first_last_layers_bf16 = false;
  num_layers_at_start_in_bf16 = num_layers_at_end_in_bf16 = 1;
}

void TransformerConfig::validate_lora(Violations& violations) const {
  if (lora_rank < 0) violations.add(cat("--lora-rank ", lora_rank, " is negative"), "0: none");
  if (lora_rank <= 0) {
    if (lora_alpha || !lora_targets.empty())
      violations.add("--lora-alpha and --lora-targets have an effect only with --lora-rank");
    return;
  }
  if (is_quantized())
    violations.add("--lora-rank with --fp8-format or --fp4-format is not built",
                   "leave one of them out");
  if (lora_alpha && !(*lora_alpha > 0))
    violations.add(cat("--lora-alpha ", *lora_alpha, " must be positive"));
  validate_lora_targets(lora_targets, is_gated(activation()), violations);
}

void TransformerConfig::validate_rope_scaling(Violations& violations) const {
  const auto require = [&](bool ok, std::string message, std::string hint = {}) {
    if (!ok) violations.add(std::move(message), std::move(hint));
  };
  const RopeScaling type = rope_scaling_type;
  require(type == RopeScaling::kNone || position_embedding_type == PositionEmbedding::kRope,
          "--rope-scaling-type has an effect only with --position-embedding-type rope");
  require(!use_rope_scaling || type == RopeScaling::kLlama3,
          "--use-rope-scaling means --rope-scaling-type llama3, but another type is given");
  require(rope_original_max_position_embeddings > 1,
          cat("--rope-original-max-position-embeddings ", rope_original_max_position_embeddings,
              " must be above 1"));
  require(type != RopeScaling::kLlama3 || rope_high_freq_factor > rope_low_freq_factor,
          cat("--rope-high-freq-factor ", rope_high_freq_factor,
              " must be above --rope-low-freq-factor ", rope_low_freq_factor));
  require(rope_low_freq_factor > 0,
          cat("--rope-low-freq-factor ", rope_low_freq_factor, " must be positive"));
  require(yarn_beta_fast > 0 && yarn_beta_slow > 0,
          "--yarn-beta-fast and --yarn-beta-slow must be positive");
  require(!rope_attention_factor || *rope_attention_factor > 0,
          cat("--rope-attention-factor ", rope_attention_factor.value_or(0), " must be positive"));
  require(!rope_attention_factor || type == RopeScaling::kYarn || type == RopeScaling::kLongRope,
          "--rope-attention-factor has an effect only with --rope-scaling-type yarn or longrope");
  const bool lists = !longrope_short_factor.empty() || !longrope_long_factor.empty();
  require(!lists || type == RopeScaling::kLongRope,
          "--longrope-short-factor and --longrope-long-factor have an effect only with "
          "--rope-scaling-type longrope");
  if (type != RopeScaling::kLongRope) return;
  const int64_t pairs = rotary_width() / 2;
  for (const auto& [flag, list] : {std::pair{"--longrope-short-factor", &longrope_short_factor},
                                   std::pair{"--longrope-long-factor", &longrope_long_factor}}) {
    require(static_cast<int64_t>(list->size()) == pairs,
            cat(flag, " has ", list->size(), " values, expected one for each of the ", pairs,
                " rotated pairs"));
    require(std::all_of(list->begin(), list->end(), [](double factor) { return factor > 0; }),
            cat(flag, " has a value that is not positive"));
  }
}

int64_t TransformerConfig::rotary_width() const {
  return static_cast<int64_t>(static_cast<double>(kv_channels) * rotary_percent);
}

double TransformerConfig::softmax_scale() const {
  return 1.0 / std::sqrt(query_pre_attn_scalar.value_or(static_cast<double>(kv_channels)));
}

Activation TransformerConfig::activation() const {
  if (swiglu) return Activation::kSwiglu;
  if (geglu) return Activation::kGeglu;
  if (quick_geglu) return Activation::kQuickGeglu;
  if (squared_relu) return Activation::kSquaredRelu;
  if (openai_gelu || (add_bias_linear && bias_gelu_fusion)) return Activation::kGeluTanh;
  return Activation::kGelu;
}

std::vector<int64_t> TransformerConfig::window(int64_t layer_number) const {
  if (window_size.empty() || window_attn_skip_freq.empty()) return window_size;
  if (const auto list = parse_list(window_attn_skip_freq))
    return list->at(static_cast<size_t>(layer_number - 1)) ? window_size : std::vector<int64_t>{};
  return layer_number % std::stoll(window_attn_skip_freq) == 0 ? std::vector<int64_t>{}
                                                               : window_size;
}

bool TransformerConfig::recomputes(std::string_view module) const {
  return recompute_granularity == RecomputeGranularity::kSelective &&
         std::find(recompute_modules.begin(), recompute_modules.end(), module) !=
             recompute_modules.end();
}

bool TransformerConfig::offloads(std::string_view module) const {
  return cpu_offloading_num_layers > 0 ||
         (fine_grained_activation_offloading && is_one_of(module, offload_modules));
}

int64_t TransformerConfig::num_offloaded_layers(int64_t chunk_layers, bool last_chunk) const {
  if (!offloads_activations()) return 0;
  const int64_t wanted = cpu_offloading_num_layers > 0
                             ? cpu_offloading_num_layers
                             : static_cast<int64_t>(std::ceil(activation_offload_fraction *
                                                              static_cast<double>(chunk_layers)));
  return std::min(wanted, last_chunk ? chunk_layers - 1 : chunk_layers);
}

ContextParallelType TransformerConfig::context_parallel_type(int64_t layer_number) const {
  const size_t index = cp_comm_type.size() == 1 ? 0 : static_cast<size_t>(layer_number - 1);
  const auto type = parse_context_parallel_type(cp_comm_type.at(index));
  MEGATRON_CHECK(type.has_value(), "--cp-comm-type ", cp_comm_type[index], " is not known",
                 "\nhint: types: p2p, all_gather, a2a, a2a+p2p");
  return *type;
}

Init TransformerConfig::weight_init(int64_t rows, int64_t columns, bool output) const {
  if (init_method_xavier_uniform)
    return Init::uniform(std::sqrt(6.0 / static_cast<double>(rows + columns)));
  return Init::normal(output ? init_method_std / std::sqrt(2.0 * static_cast<double>(num_layers))
                             : init_method_std);
}

Init TransformerConfig::embedding_init(int64_t rows) const {
  if (embedding_init_method_std) return Init::normal(*embedding_init_method_std);
  return weight_init(rows, hidden_size);
}

}  // namespace megatron
