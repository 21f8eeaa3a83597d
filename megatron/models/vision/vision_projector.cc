#include "megatron/models/vision/vision_projector.h"

#include "megatron/tensor/activation.h"
#include "megatron/tensor/torch.h"

namespace megatron {

VisionProjector::VisionProjector(const VisionConfig& config, const TransformerConfig& language)
    : config_(config) {
  const int64_t in = config.feature_size(), out = language.hidden_size,
                middle = config.vision_projection_ffn_hidden_size > 0
                             ? config.vision_projection_ffn_hidden_size
                             : out;
  const auto linear = [&](const char* name, int64_t inputs, int64_t outputs, bool norm) {
    LinearOptions options;
    options.input_norm = norm;
    if (config.vision_projection_type == VisionProjection::kAffine)
      options.norm = {.kind = Normalization::kRMSNorm,
                      .eps = config.vision_layernorm_epsilon,
                      .zero_centered = true};
    options.bias = config.vision_projection_bias;
    options.init = Init::normal(language.init_method_std);
    return std::make_unique<ColumnParallelLinear>(name, inputs, outputs, options, alone_);
  };
  if (config.vision_projection_type == VisionProjection::kMlp) {
    linear_fc1_ = linear("linear_fc1", in, middle, config.vision_projection_norm);
    add("encoder.linear_fc1", linear_fc1_.get());
    linear_fc2_ = linear("linear_fc2", middle, out, false);
    add("encoder.linear_fc2", linear_fc2_.get());
  } else {
    linear_fc2_ = linear("encoder", in, out, config.vision_projection_norm);
    add("encoder", linear_fc2_.get());
  }
}

at::Tensor VisionProjector::forward(const at::Tensor& features) {
  at::Tensor x = features.unsqueeze(1);
  if (linear_fc1_)
    x = activate(linear_fc1_->forward(x), activation_of(config_.vision_projection_activation));
  return linear_fc2_->forward(x).squeeze(1);
}

}  // namespace megatron
