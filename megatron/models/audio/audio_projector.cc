#include "megatron/models/audio/audio_projector.h"

#include "megatron/tensor/activation.h"
#include "megatron/tensor/torch.h"

namespace megatron {

AudioProjector::AudioProjector(const AudioConfig& config, const TransformerConfig& language)
    : config_(config) {
  const int64_t in = config.audio_feature_size(), out = language.hidden_size,
                middle = config.audio_projection_ffn_hidden_size > 0
                             ? config.audio_projection_ffn_hidden_size
                             : out;
  LinearOptions options;
  options.bias = config.audio_projection_bias;
  options.init = Init::normal(language.init_method_std);
  const auto linear = [&](const char* name, int64_t inputs, int64_t outputs) {
    return std::make_unique<ColumnParallelLinear>(name, inputs, outputs, options, alone_);
  };
  if (config.audio_projection_type == VisionProjection::kAffine) {
    linear_fc2_ = linear("encoder", in, out);
    add("encoder", linear_fc2_.get());
    return;
  }
  linear_fc1_ = linear("linear_fc1", in, middle);
  add("encoder.linear_fc1", linear_fc1_.get());
  linear_fc2_ = linear("linear_fc2", middle, out);
  add("encoder.linear_fc2", linear_fc2_.get());
}

at::Tensor AudioProjector::forward(const at::Tensor& features) {
  at::Tensor x = features.unsqueeze(1);
  if (linear_fc1_)
    x = activate(linear_fc1_->forward(x), activation_of(config_.audio_projection_activation));
  return linear_fc2_->forward(x).squeeze(1);
}

}  // namespace megatron
