#include "megatron/models/common/feature_projector.h"

#include <algorithm>

#include "megatron/tensor/activation.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora_modules.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {
namespace {

constexpr const char *kFirstLinear = "linear_fc1", *kSecondLinear = "linear_fc2";

}  // namespace

TransformerConfig projector_adapters(const TransformerConfig& language, std::string_view module) {
  TransformerConfig out = language;
  take_adapters(language, module, out);
  if (std::ranges::find(out.lora_targets, "all-linear") != out.lora_targets.end())
    out.lora_targets = {kFirstLinear, kSecondLinear};
  return out;
}

FeatureProjector::FeatureProjector(const ProjectorShape& shape, const TransformerConfig& language)
    : shape_(shape) {
  const int64_t out = language.hidden_size, middle = shape.middle > 0 ? shape.middle : out;
  const TransformerConfig adapters = projector_adapters(language, shape.module);
  const auto linear = [&](const char* name, int64_t inputs, int64_t outputs, bool norm) {
    LinearOptions options;
    options.input_norm = norm;
    options.norm = shape.norm;
    options.bias = shape.bias;
    options.lora = lora_options(adapters, shape.affine ? kFirstLinear : name);
    options.init = Init::normal(language.init_method_std);
    return std::make_unique<ColumnParallelLinear>(name, inputs, outputs, options, alone_);
  };
  if (shape.affine) {
    linear_fc2_ = linear("encoder", shape.inputs, out, shape.input_norm);
    add("encoder", linear_fc2_.get());
    return;
  }
  linear_fc1_ = linear(kFirstLinear, shape.inputs, middle, shape.input_norm);
  add("encoder.linear_fc1", linear_fc1_.get());
  linear_fc2_ = linear(kSecondLinear, middle, out, false);
  add("encoder.linear_fc2", linear_fc2_.get());
}

at::Tensor FeatureProjector::forward(const at::Tensor& features) {
  at::Tensor x = features.unsqueeze(1);
  if (linear_fc1_) x = activate(linear_fc1_->forward(x), shape_.activation);
  return linear_fc2_->forward(x).squeeze(1);
}

}  // namespace megatron
