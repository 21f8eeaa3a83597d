#include "megatron/transformer/config/feed_forward.h"

#include "megatron/base/check.h"

namespace megatron {

void FeedForwardConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("network behavior");
  v.field("swiglu", swiglu, "silu(gate) * up in the MLP");
  v.field("geglu", geglu, "gelu(gate) * up in the MLP, with the tanh approximation");
  v.field("exact_geglu", exact_geglu, "gelu(gate) * up in the MLP, with the exact GELU");
  v.field("quick_geglu", quick_geglu, "gate * sigmoid(1.702 gate) * (up + offset) in the MLP");
  v.field("quick_gelu", quick_gelu, "x * sigmoid(1.702 x) in the MLP (CLIP)");
  v.field("relu", relu, "relu(x) in the MLP");
  v.field("squared_relu", squared_relu, "relu(x)^2 in the MLP");
  v.field("openai_gelu", openai_gelu, "the tanh approximation of GELU");
  v.field(
      {"bias_gelu_fusion", "--no-bias-gelu-fusion", true}, bias_gelu_fusion,
      "exact GELU although linears have biases (the fused kernel computes the tanh approximation)");
  v.field("glu_linear_offset", glu_linear_offset, "offset of --quick-geglu");
  v.field("activation_func_clamp_value", activation_func_clamp_value,
          "of gated experts: the gate is bounded by it from above, the other half from both sides "
          "(gpt-oss)");
}

void FeedForwardConfig::validate(Violations& v, const ShapeConfig&) const {
  v.require(
      swiglu + geglu + exact_geglu + quick_geglu + quick_gelu + relu + squared_relu + openai_gelu <=
          1,
      "more than one activation given",
      "use one of --swiglu, --geglu, --exact-geglu, --quick-geglu, --quick-gelu, --relu, "
      "--squared-relu, --openai-gelu");
  v.require(glu_linear_offset == 0.0 || quick_geglu,
            "--glu-linear-offset has an effect only with --quick-geglu");
  if (!activation_func_clamp_value) return;
  v.require(
      *activation_func_clamp_value > 0,
      cat("--activation-func-clamp-value ", *activation_func_clamp_value, " must be positive"));
  v.require(swiglu || geglu || exact_geglu || quick_geglu,
            "--activation-func-clamp-value bounds gated activations only",
            "--quick-geglu, --swiglu, --geglu or --exact-geglu");
}

}  // namespace megatron
