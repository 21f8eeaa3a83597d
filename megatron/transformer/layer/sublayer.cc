#include "megatron/transformer/layer/sublayer.h"

#include "megatron/nn/functional.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {

NormOptions norm_options(const TransformerConfig& config, bool partial_over_tensor) {
  return {.kind = config.normalization,
          .eps = config.layernorm_epsilon,
          .zero_centered = config.layernorm_zero_centered_gamma,
          .partial_over_tensor = partial_over_tensor,
          .bias = config.norm_bias};
}

namespace {

// InternViT's branches begin small.
at::Tensor first_scale(const at::Tensor& drawn) {
  constexpr double kFirst = 0.1;
  return at::full_like(drawn, kFirst);
}

}  // namespace

ResidualSublayer::ResidualSublayer(const TransformerConfig& config, Sublayer& sublayer,
                                   RandomKey dropout_key, bool sequence_parallel,
                                   const SublayerNames& names)
    : config_(config), sublayer_(sublayer), dropout_key_(dropout_key), names_(names) {
  if (config.branch_scales) {
    scale_ = std::make_unique<Parameter>();
    scale_->local_shape = scale_->global_shape = {config.hidden_size};
    scale_->init = Init::uniform_through(first_scale, 0.0, 1.0);
    scale_->role = ParameterRole::kNorm;
    if (sequence_parallel) scale_->placement.partial_grad.insert(Axis::kTensor);
  }
  if (!config.has_post_norm()) return;
  post_norm_ = std::make_unique<Norm>(config.hidden_size, norm_options(config, sequence_parallel));
}

at::Tensor ResidualSublayer::forward(const at::Tensor& x, const LayerContext& context) {
  return run_sublayer(
      config_, names_, x, context, [this](const at::Tensor& in, const LayerContext& inner) {
        return add_residual(sublayer_.forward(in, inner, adds_in_product(inner.pass)), inner.pass);
      });
}

bool ResidualSublayer::adds_in_product(const ForwardContext& pass) const {
  return (!config_.has_post_norm() || norms_sums(config_)) && !config_.fp32_residual_connection &&
         !config_.changes_branches(pass.training);
}

at::Tensor ResidualSublayer::add_residual(const SublayerOutput& result,
                                          const ForwardContext& pass) {
  const auto sum = [&](const at::Tensor& branch) {
    const at::Tensor output = scale_ != nullptr ? branch * differentiable(*scale_) : branch;
    if (!result.residual.defined()) return output;
    const TokenPositions& place = pass.rows.position.defined() ? pass.rows : pass.place;
    const double p = pass.training ? config_.hidden_dropout : 0.0, m = config_.residual_multiplier;
    if (p == 0.0 && m != 1.0) return at::add(result.residual, output, m);
    return dropout_add(m == 1.0 ? output : output * m, result.residual, p, dropout_key_, place);
  };
  if (post_norm_ == nullptr) return sum(result.output);
  return norms_sums(config_) ? post_norm_->forward(sum(result.output))
                             : sum(post_norm_->forward(result.output));
}

}  // namespace megatron
