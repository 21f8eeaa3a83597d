#include "megatron/models/common/encoder_offload.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kEncoderModules[] = {"attn_norm", "qkv_linear", "core_attn", "attn_proj",
                                                "mlp_norm",  "mlp_fc1",    "mlp_act",   "mlp_fc2"};

}  // namespace

void EncoderOffload::fields(FieldVisitor& v) {
  v.group("encoders of media");
  v.role(FieldRole::kMachine);
  v.field("encoder_offload_modules", encoder_offload_modules,
          "whose inputs layers of trained encoders of images and sounds keep in host memory "
          "between forward and backward, of any size: attn_norm, qkv_linear, core_attn, attn_proj, "
          "mlp_norm, mlp_fc1, mlp_act, mlp_fc2");
}

void EncoderOffload::validate(Violations& v, const EncoderRecompute& again) const {
  const bool inputs_alone =
      again.recomputes_encoders() && again.encoder_recompute_method == RecomputeMethod::kUniform;
  for (const std::string& module : encoder_offload_modules) {
    const bool known = std::ranges::find(kEncoderModules, module) != std::end(kEncoderModules);
    v.require(
        known,
        cat("--encoder-offload-modules ", module, ": a layer of an encoder has no such input"),
        "modules: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, mlp_fc1, mlp_act, "
        "mlp_fc2");
    v.require(!known || !inputs_alone || module == "attn_norm",
              cat("--encoder-offload-modules ", module,
                  " has no effect: --encoder-recompute-granularity full saves only the inputs of "
                  "layers, attn_norm"),
              "leave it out, or give --encoder-recompute-method block");
  }
}

TransformerConfig EncoderOffload::offloading(TransformerConfig layers) const {
  if (!offloads_encoders()) return layers;
  layers.fine_grained_activation_offloading = true;
  layers.offload_modules = encoder_offload_modules;
  layers.min_offloaded_tensor_size = 0;
  return layers;
}

}  // namespace megatron
