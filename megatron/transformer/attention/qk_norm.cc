#include "megatron/transformer/attention/qk_norm.h"

#include "megatron/base/check.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/sublayer.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The mean over the features of all ranks, [..., 1].
at::Tensor mean_over_ranks(const at::Tensor& x, const QKNorm::OverHeads& norm) {
  at::Tensor sum = x.sum(-1, /*keepdim=*/true);
  norm.tp->all_reduce(sum)->wait();
  return sum.div_(static_cast<double>(norm.features));
}

// y = x rstd g with rstd = 1 / sqrt(mean(x^2) + eps), g = weight or 1 + weight; in fp32 (fp64).
struct OverHeadsFunction : torch::autograd::Function<OverHeadsFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                            QKNorm::OverHeads* norm) {
    const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor wide = x.to(type);
    const at::Tensor rstd = mean_over_ranks(wide.square(), *norm).add_(norm->eps).rsqrt_();
    context->saved_data["norm"] = reinterpret_cast<int64_t>(norm);
    context->save_for_backward({x, rstd});
    return (wide * rstd * gain(*norm, type)).to(x.scalar_type());
  }

  // xhat = x rstd;  dx = rstd (g dy - xhat mean(g dy xhat));  dg += sum over tokens of dy xhat
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    auto* norm = reinterpret_cast<QKNorm::OverHeads*>(context->saved_data["norm"].toInt());
    const at::Tensor &x = saved[0], &rstd = saved[1];
    const at::Tensor dy = grads[0].to(rstd.scalar_type()), xhat = x.to(rstd.scalar_type()) * rstd;
    const at::Tensor gdy = dy * gain(*norm, rstd.scalar_type());
    const at::Tensor dx = rstd * (gdy - xhat * mean_over_ranks(gdy * xhat, *norm));
    if (norm->weight.trainable) {
      const GradTarget target = norm->weight.store->grad_target(norm->weight);
      target.to_add_to().add_((dy * xhat).sum(at::IntArrayRef{0, 1}));
      norm->weight.store->grad_ready(norm->weight);
    }
    return {dx.to(x.scalar_type()), at::Tensor(), at::Tensor()};
  }

 private:
  static at::Tensor gain(QKNorm::OverHeads& norm, at::ScalarType type) {
    const AcquiredValue weight(&norm.weight);
    const at::Tensor value = weight.value()
                                 .view(norm.weight.local_shape)
                                 .to(type, /*non_blocking=*/false, /*copy=*/true);
    return norm.zero_centered ? value + 1 : value;
  }
};

}  // namespace

QKNorm::QKNorm(const TransformerConfig& config, int64_t heads, const ProcessGroup& tp) {
  NormOptions options = norm_options(config);
  options.role = ParameterRole::kQKNorm;
  if (!config.qk_layernorm_over_heads) {
    options.partial_over_tensor = tp.size() > 1;  // its gradient comes from this rank's heads only
    per_head_ = std::make_unique<Norm>(config.kv_channels, options);
    per_head_->visit([&](const std::string& name, Parameter& parameter) { add(name, &parameter); });
    return;
  }
  over_heads_ = std::make_unique<OverHeads>();
  OverHeads& norm = *over_heads_;
  norm.features = heads * config.kv_channels;
  norm.eps = options.eps;
  norm.zero_centered = options.zero_centered;
  norm.tp = &tp;
  norm.weight.global_shape = {norm.features};
  norm.weight.local_shape = {norm.features / tp.size()};
  norm.weight.placement.shards = {{0, Axis::kTensor, {}}};
  norm.weight.init = options.zero_centered ? Init::zero() : Init::one();
  norm.weight.role = options.role;
  add("weight", &norm.weight);
}

at::Tensor QKNorm::forward(const at::Tensor& x) {
  if (per_head_) return per_head_->forward(x);
  const at::Tensor flat = x.reshape({x.size(0), x.size(1), x.size(2) * x.size(3)});
  return OverHeadsFunction::apply(flat, anchor(), over_heads_.get()).view(x.sizes());
}

}  // namespace megatron
