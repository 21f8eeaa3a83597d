#include "megatron/transformer/config/recompute.h"

#include "megatron/base/check.h"
#include "megatron/transformer/config/detail/module_names.h"

namespace megatron {
namespace {

constexpr std::string_view kGranularities[] = {"none", "full", "selective"};
constexpr std::string_view kMethods[] = {"uniform", "block"};

// Values of --recompute-modules that are built, and those of layers that are not built.
constexpr std::string_view kRecomputeModules[] = {
    "core_attn",      "layernorm",   "mlp",   "mlp_act",    "moe",          "moe_act",
    "shared_experts", "mla_up_proj", "mamba", "mamba_norm", "gdn_norm_out", "retro_encoder"};
constexpr std::pair<std::string_view, std::string_view> kLaterRecomputeModules[] = {
    {"gdp_in_proj", "gated-delta attention"},
    {"gdp_qkv", "gated-delta attention"},
    {"mhc", "multi-stream residual connections"}};

}  // namespace

void RecomputeConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kMachine);
  v.group("attention and recomputation");
  v.choice("recompute_granularity", recompute_granularity, kGranularities,
           "recompute activations in the backward: whole layers or selected parts");
  v.choice("recompute_method", recompute_method, kMethods,
           "which layers full recomputation covers");
  v.field("recompute_num_layers", recompute_num_layers,
          "uniform: layers per recomputed unit; block: number of layers recomputed");
  v.field("recompute_modules", recompute_modules,
          "parts for selective recomputation: core_attn, layernorm, mlp (all of it, from its "
          "input), mlp_act (the output of its activation), moe and moe_act (the same of layers of "
          "experts), shared_experts (all of the shared expert, from its input), mla_up_proj "
          "(queries, keys and values, from their latents), mamba (all of a Mamba-2 layer, from its "
          "input), mamba_norm (the output of its gated norm), gdn_norm_out (that of a gated delta "
          "net), retro_encoder (each layer of the encoder of neighbours, from its input)");
  v.field("recompute_activations", recompute_activations,
          "short for --recompute-granularity selective");
  v.field("moe_layer_recompute", moe_layer_recompute,
          "short for --recompute-granularity selective --recompute-modules moe");
  v.field("distribute_saved_activations", distribute_saved_activations,
          "full recomputation: each tensor-parallel rank keeps a part of a saved input; the "
          "backward gathers them");
}

void RecomputeConfig::finalize() {
  if (recompute_activations && recompute_granularity == RecomputeGranularity::kNone)
    recompute_granularity = RecomputeGranularity::kSelective;
  if (moe_layer_recompute && recompute_granularity == RecomputeGranularity::kNone)
    recompute_granularity = RecomputeGranularity::kSelective;
  if (moe_layer_recompute && recompute_granularity == RecomputeGranularity::kSelective &&
      !contains_name(recompute_modules, "moe"))
    recompute_modules.push_back("moe");
  if (recompute_granularity == RecomputeGranularity::kSelective && recompute_modules.empty())
    recompute_modules = {"core_attn"};
}

void RecomputeConfig::validate(Violations& v, const ShapeConfig& shape) const {
  v.require(
      recompute_num_layers > 0 && recompute_num_layers <= shape.num_layers,
      cat("--recompute-num-layers ", recompute_num_layers, ": expected 1 to ", shape.num_layers));
  v.require(recompute_modules.empty() || recompute_granularity == RecomputeGranularity::kSelective,
            "--recompute-modules needs --recompute-granularity selective");
  for (const std::string& module : recompute_modules)
    v.require(contains_name(kRecomputeModules, module),
              cat("--recompute-modules ", module, why_unknown(module, kLaterRecomputeModules)),
              "parts: core_attn, layernorm, mlp, mlp_act, moe, moe_act, shared_experts, "
              "mla_up_proj, mamba, mamba_norm, gdn_norm_out, retro_encoder");
  v.require(!recomputes("mlp") || !recomputes("mlp_act"),
            "--recompute-modules mlp_act has no effect together with mlp",
            "mlp recomputes the activation too; give one of them");
  v.require(!recomputes("moe") || !recomputes("moe_act"),
            "--recompute-modules moe_act has no effect together with moe",
            "moe recomputes the activation too; give one of them");
  v.require(!recomputes("moe") || !recomputes("shared_experts"),
            "--recompute-modules shared_experts has no effect together with moe",
            "moe recomputes the shared expert too; give one of them");
  v.require(!recomputes("mamba") || !recomputes("mamba_norm"),
            "--recompute-modules mamba_norm has no effect together with mamba",
            "mamba recomputes the norm too; give one of them");
  v.require(!recompute_activations || recompute_granularity != RecomputeGranularity::kFull,
            "--recompute-activations asks for selective recomputation, but --recompute-granularity "
            "is full",
            "give one of them");
  v.require(!moe_layer_recompute || recompute_granularity != RecomputeGranularity::kFull,
            "--moe-layer-recompute asks for selective recomputation, but --recompute-granularity "
            "is full",
            "give one of them");
  v.require(!distribute_saved_activations || recompute_granularity == RecomputeGranularity::kFull,
            "--distribute-saved-activations needs --recompute-granularity full");
}

bool RecomputeConfig::recomputes(std::string_view module) const {
  return recompute_granularity == RecomputeGranularity::kSelective &&
         contains_name(recompute_modules, module);
}

}  // namespace megatron
