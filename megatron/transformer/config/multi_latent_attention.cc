#include "megatron/transformer/config/multi_latent_attention.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {
namespace {

constexpr std::string_view kRopeTypes[] = {"rope", "yarn"};

double magnitude(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

}  // namespace

void MultiLatentAttentionConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("multi-latent attention");
  v.field("multi_latent_attention", multi_latent_attention,
          "project queries, and keys with values, from low-rank latents (DeepSeek-V2)");
  v.field("q_lora_rank", q_lora_rank, "width of the queries' latent; none: no latent of queries");
  v.field("kv_lora_rank", kv_lora_rank, "width of the latent of keys and values");
  v.field("qk_head_dim", qk_head_dim, "features of a query and key head that are not rotated");
  v.field("qk_pos_emb_head_dim", qk_pos_emb_head_dim,
          "features of a query and key head that are rotated; all heads share those of the key");
  v.field("v_head_dim", v_head_dim, "width of a value head");
  v.field("latent_norm_epsilon", latent_norm_epsilon,
          "added to the variance in the norms of latents (--qk-layernorm); none: --norm-epsilon");
  v.choice("rope_type", rope_type, kRopeTypes,
           "rotary positions of multi-latent attention; yarn stretches them by "
           "--rotary-scaling-factor, from --yarn-original-max-position-embeddings");
  v.field("rotary_scaling_factor", rotary_scaling_factor,
          "with --rope-type yarn: factor of the length of the training; 1: not stretched");
  v.field("mscale", mscale,
          "with --rotary-scaling-factor: weight of its logarithm in the factor of cosines and "
          "sines");
  v.field("mscale_all_dim", mscale_all_dim,
          "with --rotary-scaling-factor: weight of its logarithm in the scale of attention scores, "
          "which cosines and sines are divided by");
}

void MultiLatentAttentionConfig::validate(Violations& v, const ShapeConfig& shape) const {
  if (!multi_latent_attention) {
    const MultiLatentAttentionConfig none;
    v.require(
        q_lora_rank == none.q_lora_rank && kv_lora_rank == none.kv_lora_rank &&
            qk_head_dim == none.qk_head_dim && qk_pos_emb_head_dim == none.qk_pos_emb_head_dim &&
            v_head_dim == none.v_head_dim && latent_norm_epsilon == none.latent_norm_epsilon &&
            rope_type == none.rope_type && rotary_scaling_factor == none.rotary_scaling_factor &&
            mscale == none.mscale && mscale_all_dim == none.mscale_all_dim,
        "--q-lora-rank, --kv-lora-rank, --qk-head-dim, --qk-pos-emb-head-dim, --v-head-dim, "
        "--latent-norm-epsilon, --rope-type, --rotary-scaling-factor, --mscale and "
        "--mscale-all-dim have an effect only with --multi-latent-attention",
        "--rope-scaling-type scales the rotary positions of other attention");
    return;
  }
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(value > 0, cat(flag, " ", value, " must be positive"));
  };
  positive("--q-lora-rank", q_lora_rank.value_or(1));
  positive("--kv-lora-rank", kv_lora_rank);
  positive("--qk-head-dim", qk_head_dim);
  positive("--v-head-dim", v_head_dim);
  v.require(qk_pos_emb_head_dim > 0 && qk_pos_emb_head_dim % 2 == 0,
            cat("--qk-pos-emb-head-dim ", qk_pos_emb_head_dim,
                ": rotated features come in pairs, a positive even number"));
  v.require(shape.kv_channels == query_head_size(),
            cat("--kv-channels ", shape.kv_channels,
                " with --multi-latent-attention, whose query heads have --qk-head-dim + "
                "--qk-pos-emb-head-dim = ",
                query_head_size(), " features"),
            "leave --kv-channels out");
  v.require(!shape.group_query_attention,
            "--group-query-attention cannot be used with --multi-latent-attention, whose heads "
            "share one latent",
            "leave --group-query-attention out");
  v.require(!latent_norm_epsilon || *latent_norm_epsilon > 0,
            cat("--latent-norm-epsilon ", latent_norm_epsilon.value_or(0), " must be positive"));
  v.require(rotary_scaling_factor >= 1.0,
            cat("--rotary-scaling-factor ", rotary_scaling_factor, " is below 1"));
  v.require(rope_type == LatentRope::kYarn || rotary_scaling_factor == 1.0,
            "--rotary-scaling-factor has an effect only with --rope-type yarn");
  v.require(mscale >= 0 && mscale_all_dim >= 0,
            "--mscale and --mscale-all-dim must not be negative");
}

double MultiLatentAttentionConfig::rotary_magnitude() const {
  return magnitude(rotary_scaling_factor, mscale) /
         magnitude(rotary_scaling_factor, mscale_all_dim);
}

double MultiLatentAttentionConfig::score_magnitude() const {
  if (!stretches_positions()) return 1.0;
  const double m = magnitude(rotary_scaling_factor, mscale_all_dim);
  return m * m;
}

void validate_multi_latent_attention(const TransformerConfig& c, Violations& v) {
  v.require(c.position_embedding_type == PositionEmbedding::kRope,
            "--multi-latent-attention rotates queries and keys, which --position-embedding-type "
            "must say",
            "--position-embedding-type rope");
  v.require(c.rope_scaling_type == RopeScaling::kNone && !c.rope_attention_factor,
            "--rope-scaling-type and --rope-attention-factor are of other attention than "
            "--multi-latent-attention",
            "--rope-type yarn --rotary-scaling-factor, --mscale and --mscale-all-dim");
  v.require(!c.rotary_interleaved,
            "--rotary-interleaved cannot be used with --multi-latent-attention, which sorts the "
            "pairs into halves before it rotates");
  v.require(c.mrope_section.empty(),
            "--position-embedding-type mrope with --multi-latent-attention is not built");
  v.require(c.rotary_percent == 1.0, "--rotary-percent has no effect with --multi-latent-attention",
            "--qk-pos-emb-head-dim says how many features are rotated");
  v.require(!c.query_pre_attn_scalar,
            "--query-pre-attn-scalar has no effect with --multi-latent-attention, whose scale "
            "follows from its head sizes and --mscale-all-dim",
            "leave it out");
  v.require(!c.add_qkv_bias,
            "--add-qkv-bias: the projections of --multi-latent-attention have no biases",
            "leave it out");
  v.require(!c.qk_layernorm_over_heads,
            "--qk-layernorm-over-heads has no effect with --multi-latent-attention, which norms "
            "latents",
            "--qk-layernorm alone");
  v.require(!c.latent_norm_epsilon || c.qk_layernorm,
            "--latent-norm-epsilon has an effect only with --qk-layernorm");
}

}  // namespace megatron
