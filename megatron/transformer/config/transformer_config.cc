#include "megatron/transformer/config/transformer_config.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/transformer/config/letters.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

// What a pattern needs of the other flags, and what is not built beside it.
void validate_hybrid(const TransformerConfig& t, Violations& v) {
  const auto refuse = [&](bool given, std::string_view flag) {
    if (given)
      v.add(cat(flag, " with --hybrid-layer-pattern is not built"), "leave one of them out");
  };
  refuse(t.parallel_residual, "--parallel-residual");
  refuse(t.norm_placement != NormPlacement::kPre, "--norm-placement other than pre");
  refuse(!t.first_input_norm, "--no-first-input-norm");
  refuse(t.mtp_num_layers > 0, "--mtp-num-layers");
  if (!t.attends() && t.position_embedding_type == PositionEmbedding::kRope)
    v.add(
        "--position-embedding-type rope has no effect on a --hybrid-layer-pattern without "
        "attention",
        "--position-embedding-type none");
}

// What is not built beside --attention-output-gate.
void validate_output_gate(const TransformerConfig& t, Violations& v) {
  const auto refuse = [&](bool given, std::string_view what) {
    v.require(!t.attention_output_gate || !given,
              cat("--attention-output-gate with ", what, " is not built"), "leave one of them out");
  };
  refuse(t.multi_latent_attention, "--multi-latent-attention");
  refuse(t.offloads_activations(), "offloading of activations");
}

}  // namespace

void TransformerConfig::fields(FieldVisitor& visitor) {
  ShapeConfig::fields(visitor);
  visit_topics(visitor);
}

void TransformerConfig::finalize() {
  PositionConfig::finalize();
  RecomputeConfig::finalize();
  if (num_layers == 0) num_layers = static_cast<int64_t>(hybrid_letters().size());
  if (is_hybrid() && has_moe() && moe_layer_freq == MoEConfig().moe_layer_freq)
    moe_layer_freq = hybrid_moe_layers();
  if (ffn_hidden_size == 0)
    ffn_hidden_size = swiglu ? hidden_size * 8 / 3 / 64 * 64 : 4 * hidden_size;
  if (kv_channels == 0 && multi_latent_attention) kv_channels = query_head_size();
  if (kv_channels == 0 && num_attention_heads > 0) kv_channels = hidden_size / num_attention_heads;
  if (max_position_embeddings == 0) max_position_embeddings = seq_length;
  if (has_adapters()) {
    if (!lora_alpha) lora_alpha = static_cast<double>(lora_rank);
    lora_targets = written_out_lora_targets(lora_targets, adaptable_linears(*this));
  }
}

void TransformerConfig::validate(Violations& v) const {
  if (is_hybrid() && num_layers == 0) return HybridConfig::validate(v, *this);  // it has no letters
  ShapeConfig::validate(v, attends());
  if (!is_given()) return;
  validate_topics(v, *this);
  // Between topics
  if (multi_latent_attention) validate_multi_latent_attention(*this, v);
  if (is_hybrid()) validate_hybrid(*this, v);
  validate_output_gate(*this, v);
  validate_letters(*this, v);
  if (!has_moe())
    for (const std::string& flag : given_dispatch_flags())
      v.add(cat(flag, " has no effect without --num-experts"));
  v.require(!has_moe() || !moe_shared_expert_overlap || moe_shared_expert_intermediate_size,
            "--moe-shared-expert-overlap needs --moe-shared-expert-intermediate-size");
  v.require(multi_latent_attention || !recomputes("mla_up_proj"),
            "--recompute-modules mla_up_proj has an effect only with --multi-latent-attention");
  v.require(lora_rank <= 0 || !is_quantized(),
            "--lora-rank with --fp8-format or --fp4-format is not built", "leave one of them out");
  if (has_adapters()) validate_lora_targets(lora_targets, adaptable_linears(*this), v);
  v.require(first_input_norm || !multi_latent_attention,
            "--no-first-input-norm with --multi-latent-attention is not built");
  v.require(!rotary_base_local || !window_size.empty(),
            "--rotary-base-local has an effect only with --window-size");
  v.require(norm_placement != NormPlacement::kPost || !fp32_residual_connection,
            "--norm-placement post with --fp32-residual-connection is not built");
  v.require(has_final_norm(*this) || !fp32_residual_connection,
            "--norm-placement residual with --fp32-residual-connection is not built");
  v.require(has_final_norm(*this) || mtp_num_layers <= 0,
            "--norm-placement residual with --mtp-num-layers is not built");
  v.require(
      !parallel_residual || !(recomputes("mlp") || offloads_activations()),
      "--parallel-residual with --recompute-modules mlp or offloading of activations is not built");
  v.require(attn_logit_softcapping == 0 || (attention_backend != AttentionBackend::kFlash &&
                                            attention_backend != AttentionBackend::kFused),
            "--attention-backend flash and fused do not compute --attn-logit-softcapping",
            "--attention-backend auto");
  v.require(mtp_num_layers <= 0 || lora_rank <= 0, "--mtp-num-layers with --lora-rank is not built",
            "leave one of them out");
  v.require(mtp_num_layers <= 0 || !fp32_residual_connection,
            "--mtp-num-layers with --fp32-residual-connection is not built");
  v.require(softmax_type == SoftmaxType::kVanilla || !multi_latent_attention,
            "--softmax-type with --multi-latent-attention is not built", "--softmax-type vanilla");
  const bool no_mlp =
      is_hybrid() ? count_hybrid_letter('-') == 0 : num_moe_layers(num_layers) == num_layers;
  const bool only_experts = no_mlp && has_moe() && !moe_shared_expert_intermediate_size;
  v.require(!activation_func_clamp_value || only_experts,
            "--activation-func-clamp-value is built for experts, not for MLPs and shared experts",
            "--num-experts with --moe-layer-freq 1 and without a shared expert");
  validate_offloading(*this, *this, v);
}

RotaryScaling TransformerConfig::rotary_scaling() const {
  if (!multi_latent_attention)
    return {rope_scaling_type, rope_scaling_factor, rope_attention_factor};
  if (!stretches_positions()) return {};
  return {RopeScaling::kYarn, rotary_scaling_factor, rotary_magnitude()};
}

double TransformerConfig::softmax_scale() const {
  if (multi_latent_attention)
    return score_magnitude() / std::sqrt(static_cast<double>(query_head_size()));
  return 1.0 / std::sqrt(query_pre_attn_scalar.value_or(static_cast<double>(kv_channels)));
}

Activation TransformerConfig::activation() const {
  if (swiglu) return Activation::kSwiglu;
  if (geglu) return Activation::kGeglu;
  if (exact_geglu) return Activation::kExactGeglu;
  if (quick_geglu) return Activation::kQuickGeglu;
  if (quick_gelu) return Activation::kQuickGelu;
  if (relu) return Activation::kRelu;
  if (squared_relu) return Activation::kSquaredRelu;
  if (openai_gelu || (add_bias_linear && bias_gelu_fusion)) return Activation::kGeluTanh;
  return Activation::kGelu;
}

int64_t TransformerConfig::draw_number(int64_t layer_number) const {
  if (!is_hybrid()) return layer_number;
  int64_t number = 0;
  for (int64_t layer = 1; layer <= layer_number; ++layer)
    number += hybrid_letter(layer) == hybrid_letter(layer_number);
  return number;
}

bool TransformerConfig::has_letter(char letter) const {
  if (is_hybrid()) return count_hybrid_letter(letter) > 0;
  for (int64_t layer = 1; layer <= num_layers; ++layer)
    if (layer_letters(layer).find(letter) != std::string_view::npos) return true;
  return false;
}

bool TransformerConfig::can_divide_rows() const {
  const bool in_blocks =
      is_quantized() && fp4_format == Fp4Format::kNone && fp8_recipe == Fp8Recipe::kBlockwise;
  return !multi_latent_attention && !is_hybrid() && !has_moe() && !in_blocks;
}

Init TransformerConfig::weight_init(int64_t rows, int64_t columns, bool output) const {
  if (init_method_xavier_uniform)
    return Init::uniform(std::sqrt(6.0 / static_cast<double>(rows + columns)));
  const double connections = (is_hybrid() ? 1.0 : 2.0) * static_cast<double>(num_layers);
  return Init::normal(output ? init_method_std / std::sqrt(connections) : init_method_std);
}

Init TransformerConfig::embedding_init(int64_t rows) const {
  if (embedding_init_method_std) return Init::normal(*embedding_init_method_std);
  return weight_init(rows, hidden_size);
}

}  // namespace megatron
