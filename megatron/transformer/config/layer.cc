#include "megatron/transformer/config/layer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

constexpr std::string_view kNorms[] = {"LayerNorm", "RMSNorm"};
constexpr std::string_view kNormPlacements[] = {"pre", "post", "sandwich", "residual"};

}  // namespace

void LayerConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("network behavior");
  v.choice("normalization", normalization, kNorms, "norm of every layer");
  v.field({"layernorm_epsilon", "--norm-epsilon --layernorm-epsilon"}, layernorm_epsilon,
          "added to the variance");
  v.field({"layernorm_zero_centered_gamma", "--apply-layernorm-1p"}, layernorm_zero_centered_gamma,
          "store norm weights as their difference from 1");
  v.field({"norm_bias", "--disable-norm-bias", true}, norm_bias, "no biases in LayerNorms");
  v.field({"add_bias_linear", "--disable-bias-linear", true}, add_bias_linear,
          "no biases in linear layers");
  v.field("add_qkv_bias", add_qkv_bias, "biases in the query, key and value projection only");
  v.field("qk_layernorm", qk_layernorm, "normalise queries and keys per head");
  v.field(
      "qk_layernorm_over_heads", qk_layernorm_over_heads,
      "with --qk-layernorm: one RMS over all heads of a token instead of one per head (OLMo 2)");
  v.choice("norm_placement", norm_placement, kNormPlacements,
           "normalise the input of attention and MLP (pre), their output before it is added "
           "(post), both (sandwich), or the sum of input and output, without a final norm "
           "(residual)");
  v.field({"first_input_norm", "--no-first-input-norm", true}, first_input_norm,
          "the first layer's attention reads its input as it is, where a norm of the embeddings "
          "comes before (ModernBERT)");
  v.field("parallel_residual", parallel_residual,
          "attention and MLP both read the layer's input: x + attention(norm(x)) + mlp(norm(x))");
  v.field("scale_embeddings", scale_embeddings,
          "multiply embeddings by the square root of hidden_size");
  v.field("embedding_multiplier", embedding_multiplier,
          "multiply embeddings by this number (Granite)");
  v.field("residual_multiplier", residual_multiplier,
          "multiply the output of attention, MLP and other sublayers by this number before it is "
          "added to their input (Granite)");
  v.role(FieldRole::kNumerics);
  v.group("regularization");
  v.field("hidden_dropout", hidden_dropout,
          "dropout of embeddings and of each branch before the residual");
}

void LayerConfig::validate(Violations& v, const ShapeConfig&) const {
  v.require(!qk_layernorm_over_heads || (qk_layernorm && normalization == Normalization::kRMSNorm),
            "--qk-layernorm-over-heads needs --qk-layernorm and --normalization RMSNorm");
  v.require(!parallel_residual || norm_placement == NormPlacement::kPre,
            "--parallel-residual with norms on the output of branches is not built",
            "--norm-placement pre");
  v.require(norm_bias || normalization == Normalization::kLayerNorm,
            "--disable-norm-bias has an effect only with --normalization LayerNorm");
  v.require(
      first_input_norm || (norms_inputs(*this) && !parallel_residual),
      "--no-first-input-norm with --parallel-residual or without norms of inputs is not built",
      "--norm-placement pre or sandwich");
  for (const auto& [flag, value] : {std::pair{"--embedding-multiplier", embedding_multiplier},
                                    {"--residual-multiplier", residual_multiplier}})
    v.require(std::isfinite(value) && value != 0.0,
              cat(flag, " ", value, " is not a number other than 0"), "1: not multiplied");
  v.require(!scale_embeddings || embedding_multiplier == 1.0,
            "--scale-embeddings and --embedding-multiplier both multiply embeddings",
            "leave one of them out");
  v.require(hidden_dropout >= 0 && hidden_dropout < 1,
            cat("--hidden-dropout ", hidden_dropout, " is outside [0, 1)"));
  v.require(layernorm_epsilon > 0, cat("--norm-epsilon ", layernorm_epsilon, " must be positive"));
}

std::string_view LayerConfig::layer_letters(int64_t layer_number) const {
  if (layer_pattern.empty()) return "*-";
  const std::string_view pattern = layer_pattern;
  const int64_t entries = 1 + std::count(pattern.begin(), pattern.end(), ',');
  size_t begin = 0;
  for (int64_t skipped = (layer_number - 1) % entries; skipped > 0; --skipped)
    begin = pattern.find(',', begin) + 1;
  return pattern.substr(begin, pattern.find(',', begin) - begin);
}

}  // namespace megatron
