#include "megatron/nn/functional.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct DifferentiableParameter : torch::autograd::Function<DifferentiableParameter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor&, Parameter* parameter,
                            std::optional<at::ScalarType> type) {
    context->saved_data["parameter"] = reinterpret_cast<int64_t>(parameter);
    // No view of the store's buffer: a gather that ends there later would count as a change of it.
    const at::Tensor value =
        parameter->store->acquire(*parameter).view(parameter->local_shape).variable_data();
    return type ? value.to(*type) : value;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto* parameter = reinterpret_cast<Parameter*>(context->saved_data["parameter"].toInt());
    parameter->store->release(*parameter);
    if (parameter->trainable) {
      const GradTarget target = parameter->store->grad_target(*parameter);
      target.to_add_to().add_(grads[0]);
      parameter->store->grad_ready(*parameter);
    }
    return {at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor GradTarget::to_add_to() const {
  if (beta == 0.0) {
    tensor.zero_();
  } else if (beta != 1.0) {
    tensor.mul_(beta);
  }
  return tensor;
}

at::Tensor anchor() { return at::empty({0}).set_requires_grad(true); }

at::Tensor differentiable(Parameter& parameter, std::optional<at::ScalarType> type) {
  MEGATRON_ASSERT(parameter.store != nullptr, parameter.name, " has no store");
  const bool recorded = at::GradMode::is_enabled();
  if (!recorded || !parameter.trainable) {  // no backward will release it
    const AcquiredValue value(&parameter);
    const at::Tensor view = value.value().view(parameter.local_shape);
    // What autograd saves for the gradients of others must outlive the gathered value.
    if (recorded) return view.to(type.value_or(view.scalar_type()), /*non_blocking=*/false, true);
    return type ? view.to(*type) : view;
  }
  return DifferentiableParameter::apply(anchor(), &parameter, type);
}

void run_weight_gradient(Parameter& weight, std::function<void(const GradTarget&)> accumulate) {
  if (!weight.trainable) return;
  const auto run = [&weight, accumulate = std::move(accumulate)] {
    const at::NoGradGuard no_grad;  // the store runs what it deferred outside of a backward
    accumulate(weight.store->grad_target(weight));
    weight.store->grad_ready(weight);
  };
  if (!weight.store->defer(run)) run();
}

std::vector<at::Tensor> saved_for(const Parameter& weight, std::vector<at::Tensor> saved) {
  if (weight.store->defers())
    for (at::Tensor& tensor : saved)
      if (tensor.defined()) tensor = tensor.variable_data();  // detach() keeps what it views
  return saved;
}

AcquiredValue::AcquiredValue(Parameter* parameter) : parameter_(parameter) {
  if (parameter_ == nullptr) return;
  MEGATRON_ASSERT(parameter_->store != nullptr, parameter_->name, " has no store");
  value_ = parameter_->store->acquire(*parameter_);
}

AcquiredValue::~AcquiredValue() {
  if (parameter_ != nullptr) parameter_->store->release(*parameter_);
}

}  // namespace megatron
