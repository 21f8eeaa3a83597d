#include "megatron/nn/norm.h"

#include "megatron/nn/functional.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Casts a value to the type of the activations, which differs with an fp32 residual.
at::Tensor as(const at::Tensor& value, const at::Tensor& x) {
  return value.defined() ? value.to(x.scalar_type()) : value;
}

// The gradient target of a norm parameter; the kernels only add.
at::Tensor accumulation_target(Parameter* parameter) {
  if (parameter == nullptr) return {};
  if (!parameter->trainable)
    return at::zeros(parameter->local_shape, parameter->value.options().dtype(at::kFloat));
  return parameter->store->grad_target(*parameter).to_add_to();
}

void mark_ready(Parameter* parameter) {
  if (parameter != nullptr && parameter->trainable) parameter->store->grad_ready(*parameter);
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                            NormParameters* norm) {
    NormResult result = norm_forward(*norm, x);
    context->saved_data["norm"] = reinterpret_cast<int64_t>(norm);
    context->save_for_backward({x, result.mean, result.rstd});
    return result.y;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    auto* norm = reinterpret_cast<NormParameters*>(context->saved_data["norm"].toInt());
    return {norm_backward(*norm, grads[0], saved[0], saved[1], saved[2]), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

NormParameters::NormParameters(int64_t size, const NormOptions& o) : options(o) {
  for (Parameter* parameter : {&weight, &bias}) {
    parameter->local_shape = parameter->global_shape = {size};
    parameter->role = options.role;
    if (options.partial_over_tensor) parameter->placement.partial_grad.insert(Axis::kTensor);
  }
  weight.init = options.zero_centered ? Init::zero() : Init::one();
}

NormResult norm_forward(NormParameters& norm, const at::Tensor& x, const at::Tensor& amax) {
  const AcquiredValue weight(&norm.weight), bias(norm.bias_or_null());
  return norm_forward(norm.options.kind, x, as(weight.value(), x), as(bias.value(), x),
                      norm.options.eps, norm.options.zero_centered, amax);
}

at::Tensor norm_apply(NormParameters& norm, const at::Tensor& x, const at::Tensor& mean,
                      const at::Tensor& rstd) {
  const AcquiredValue weight(&norm.weight), bias(norm.bias_or_null());
  return norm_apply(norm.options.kind, x, as(weight.value(), x), as(bias.value(), x), mean, rstd,
                    norm.options.zero_centered);
}

at::Tensor norm_backward(NormParameters& norm, const at::Tensor& dy, const at::Tensor& x,
                         const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& residual_grad) {
  const AcquiredValue weight(&norm.weight);
  Parameter* bias = norm.bias_or_null();
  at::Tensor dx =
      norm_backward(norm.options.kind, dy.to(x.scalar_type()).contiguous(), x,
                    as(weight.value(), x), mean, rstd, norm.options.zero_centered,
                    accumulation_target(&norm.weight), accumulation_target(bias), residual_grad);
  mark_ready(&norm.weight);
  mark_ready(bias);
  return dx;
}

Norm::Norm(int64_t size, const NormOptions& options) : parameters_(size, options) {
  add("weight", &parameters_.weight);
  if (Parameter* bias = parameters_.bias_or_null()) add("bias", bias);
}

at::Tensor Norm::forward(const at::Tensor& x) {
  return NormFunction::apply(x.contiguous(), anchor(), &parameters_);
}

}  // namespace megatron
