#include "megatron/transformer/config/offload.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/transformer/config/detail/module_names.h"

namespace megatron {
namespace {

constexpr std::string_view kOffloadModules[] = {
    "attn_norm", "qkv_linear", "core_attn", "attn_proj",  "mlp_norm",
    "mlp_fc1",   "mlp_act",    "mlp_fc2",   "expert_fc1", "moe_act"};
constexpr std::pair<std::string_view, std::string_view> kLaterOffloadModules[] = {
    {"fused_group_mlp", "one kernel for the products of experts and what lies between"},
    {"gdp_qkv", "gated-delta attention"}};

// Why the input of this part of a layer is not saved at all, or empty.
std::string_view why_not_saved(const RecomputeConfig& c, std::string_view module) {
  const bool inputs_alone = c.recompute_granularity == RecomputeGranularity::kFull &&
                            c.recompute_method == RecomputeMethod::kUniform;
  if (inputs_alone && module != "attn_norm")
    return "--recompute-granularity full saves only the inputs of layers, attn_norm";
  const bool inside_mlp = module == "mlp_fc1" || module == "mlp_act" || module == "mlp_fc2";
  if (inside_mlp && c.recomputes("mlp"))
    return "--recompute-modules mlp saves only its input, mlp_norm";
  if ((module == "qkv_linear" || module == "mlp_fc1") && c.recomputes("layernorm"))
    return "--recompute-modules layernorm does not save it";
  if (module == "core_attn" && c.recomputes("mla_up_proj"))
    return "--recompute-modules mla_up_proj does not save it";
  if (module == "mlp_fc2" && c.recomputes("mlp_act"))
    return "--recompute-modules mlp_act does not save it";
  if ((module == "expert_fc1" || module == "moe_act") && c.recomputes("moe"))
    return "--recompute-modules moe saves only its input, mlp_norm";
  return {};
}

}  // namespace

void OffloadConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kMachine);
  v.group("attention and recomputation");
  v.field("fine_grained_activation_offloading", fine_grained_activation_offloading,
          "keep the activations of --offload-modules in host memory between forward and backward");
  v.field("offload_modules", offload_modules,
          "whose inputs are offloaded: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, "
          "mlp_fc1, mlp_act, mlp_fc2; of experts expert_fc1 and moe_act");
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
}

void OffloadConfig::validate(Violations& v, const ShapeConfig& shape) const {
  const bool fine = fine_grained_activation_offloading;
  v.require(!fine || !offload_modules.empty(),
            "--fine-grained-activation-offloading is given without --offload-modules",
            "for example --offload-modules core_attn attn_proj mlp_act mlp_fc2");
  v.require(fine || offload_modules.empty(),
            "--offload-modules needs --fine-grained-activation-offloading");
  for (const std::string& module : offload_modules)
    v.require(contains_name(kOffloadModules, module),
              cat("--offload-modules ", module, why_unknown(module, kLaterOffloadModules)),
              "modules: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, mlp_fc1, mlp_act, "
              "mlp_fc2, expert_fc1, moe_act");
  v.require(min_offloaded_tensor_size >= 0,
            cat("--min-offloaded-tensor-size ", min_offloaded_tensor_size, " is negative"));
  v.require(
      activation_offload_fraction > 0 && activation_offload_fraction <= 1,
      cat("--activation-offload-fraction ", activation_offload_fraction, " is outside (0, 1]"));
  v.require(
      fine || activation_offload_fraction == 1.0,
      "--activation-offload-fraction has an effect only with --fine-grained-activation-offloading");
  v.require(fine_grained_offloading_max_inflight_offloads >= 1,
            cat("--fine-grained-offloading-max-inflight-offloads ",
                fine_grained_offloading_max_inflight_offloads, " must be positive"));
  const int64_t layers = cpu_offloading_num_layers;
  v.require(layers >= 0 && (layers == 0 || layers < shape.num_layers),
            cat("--cpu-offloading-num-layers ", layers, ": expected 0 to ", shape.num_layers - 1));
  v.require(layers == 0 || !fine,
            "--cpu-offloading-num-layers and --fine-grained-activation-offloading are both given",
            "give one of them");
}

void validate_offloading(const OffloadConfig& offload, const RecomputeConfig& recompute,
                         Violations& v) {
  for (const std::string& module : offload.offload_modules) {
    if (!offload.fine_grained_activation_offloading || !contains_name(kOffloadModules, module))
      continue;
    const std::string_view reason = why_not_saved(recompute, module);
    v.require(reason.empty(), cat("--offload-modules ", module, " has no effect: ", reason),
              "leave it out");
  }
  v.require(!recompute.distribute_saved_activations || !offload.offloads_activations(),
            "--distribute-saved-activations is not built together with offloading",
            "give one of them");
  v.require(offload.cpu_offloading_num_layers == 0 ||
                recompute.recompute_granularity == RecomputeGranularity::kNone,
            "--cpu-offloading-num-layers cannot be combined with recomputation",
            "give --fine-grained-activation-offloading with --offload-modules");
}

bool OffloadConfig::offloads(std::string_view module) const {
  return cpu_offloading_num_layers > 0 ||
         (fine_grained_activation_offloading && contains_name(offload_modules, module));
}

int64_t OffloadConfig::num_offloaded_layers(int64_t chunk_layers, bool last_chunk) const {
  if (!offloads_activations()) return 0;
  const int64_t wanted = cpu_offloading_num_layers > 0
                             ? cpu_offloading_num_layers
                             : static_cast<int64_t>(std::ceil(activation_offload_fraction *
                                                              static_cast<double>(chunk_layers)));
  return std::max<int64_t>(0, std::min(wanted, last_chunk ? chunk_layers - 1 : chunk_layers));
}

}  // namespace megatron
