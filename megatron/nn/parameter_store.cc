#include "megatron/nn/parameter_store.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

PlainParameterStore::PlainParameterStore(Module& module, at::ScalarType dtype, at::Device device,
                                         bool gradients) {
  const auto grad_type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  module.visit([&](const std::string&, Parameter& parameter) {
    parameter.value =
        at::zeros(parameter.local_shape, at::dtype(value_type(parameter, dtype)).device(device));
    parameter.store = this;
    if (gradients)
      grads_[&parameter] = at::zeros(parameter.local_shape, at::dtype(grad_type).device(device));
  });
}

GradTarget PlainParameterStore::grad_target(Parameter& parameter) { return {grad(parameter), 1.0}; }

const at::Tensor& PlainParameterStore::grad(const Parameter& parameter) const {
  const auto found = grads_.find(&parameter);
  MEGATRON_ASSERT(found != grads_.end(), "no gradient of ", parameter.name,
                  ": the store was made without gradients");
  return found->second;
}

void PlainParameterStore::zero_grad() {
  for (auto& [parameter, grad] : grads_) grad.zero_();
}

}  // namespace megatron
