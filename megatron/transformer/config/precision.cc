#include "megatron/transformer/config/precision.h"

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kFp8Formats[] = {"none", "e4m3", "hybrid"};
constexpr std::string_view kFp8Recipes[] = {"delayed", "tensorwise", "blockwise", "mxfp8",
                                            "custom"};
constexpr std::string_view kAmaxAlgorithms[] = {"most_recent", "max"};
constexpr std::string_view kFp4Formats[] = {"none", "e2m1"};
constexpr std::string_view kFp4Recipes[] = {"nvfp4", "custom"};

}  // namespace

void PrecisionConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("network behavior");
  v.field("fp32_residual_connection", fp32_residual_connection, "keep the residual stream in fp32");
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
}

void PrecisionConfig::validate(Violations& v, const ShapeConfig& shape) const {
  const bool fp8 = fp8_format != Fp8Format::kNone, fp4 = fp4_format != Fp4Format::kNone;
  v.require(!fp8 || !fp4, "--fp8-format and --fp4-format are both given", "give one of them");
  v.require(fp8 || fp8_recipe == Fp8Recipe::kDelayed, "--fp8-recipe is given without --fp8-format",
            "--fp8-format hybrid, or e4m3");
  v.require(fp8_recipe != Fp8Recipe::kMxfp8,
            "--fp8-recipe mxfp8 needs the scaled products of Blackwell GPUs and is not built",
            "recipes for Hopper: tensorwise, delayed, blockwise");
  v.require(fp8_recipe != Fp8Recipe::kCustom,
            "--fp8-recipe custom loads quantisers from Python, which does not run here",
            "recipes: tensorwise, delayed, blockwise");
  v.require(fp4_recipe != Fp4Recipe::kCustom,
            "--fp4-recipe custom loads quantisers from Python, which does not run here",
            "--fp4-recipe nvfp4");
  const bool delayed = fp8 && fp8_recipe == Fp8Recipe::kDelayed;
  const auto needs_delayed = [&](const char* flag, bool given) {
    v.require(delayed || !given,
              cat(flag, " has an effect only with --fp8-format and --fp8-recipe delayed"),
              "leave it out");
  };
  needs_delayed("--fp8-margin", fp8_margin != 0);
  needs_delayed("--fp8-amax-history-len", fp8_amax_history_len != 1);
  needs_delayed("--fp8-amax-compute-algo", fp8_amax_compute_algo != AmaxAlgorithm::kMostRecent);
  v.require(fp8_margin >= 0 && fp8_margin <= 16,
            cat("--fp8-margin ", fp8_margin, " is outside 0 to 16"));
  v.require(fp8_amax_history_len >= 1 && fp8_amax_history_len <= 65536,
            cat("--fp8-amax-history-len ", fp8_amax_history_len, " is outside 1 to 65536 steps"));
  v.require(fp8 || fp4 || fp8_wgrad,
            "--no-fp8-wgrad has an effect only with --fp8-format or --fp4-format", "leave it out");
  v.require(fp8 || fp4 || !first_last_layers_bf16,
            "--first-last-layers-bf16 has an effect only with --fp8-format or --fp4-format",
            "leave it out");
  const int64_t start = num_layers_at_start_in_bf16, end = num_layers_at_end_in_bf16;
  v.require(start >= 0 && end >= 0,
            cat("--num-layers-at-start-in-bf16 ", start, " and --num-layers-at-end-in-bf16 ", end,
                " must not be negative"));
  v.require(
      first_last_layers_bf16 || (start == 1 && end == 1),
      "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 have an effect only with "
      "--first-last-layers-bf16");
  v.require(!first_last_layers_bf16 || start + end < shape.num_layers,
            cat("--num-layers-at-start-in-bf16 ", start, " and --num-layers-at-end-in-bf16 ", end,
                " leave none of --num-layers ", shape.num_layers, " to quantise"));
}

QuantizationOptions PrecisionConfig::quantization(int64_t layer_number, int64_t num_layers) const {
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

void PrecisionConfig::remove_quantization() {
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

}  // namespace megatron
