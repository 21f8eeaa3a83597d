#include "megatron/models/bert/dense.h"

#include "megatron/nn/functional.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct DenseFunction : torch::autograd::Function<DenseFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                            Parameter* weight, Parameter* bias) {
    const AcquiredValue w(weight), b(bias);
    context->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    context->saved_data["bias"] = reinterpret_cast<int64_t>(bias);
    context->save_for_backward({x});
    return linear_forward(x, w.value(), b.value());
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto* weight = reinterpret_cast<Parameter*>(context->saved_data["weight"].toInt());
    auto* bias = reinterpret_cast<Parameter*>(context->saved_data["bias"].toInt());
    const at::Tensor dy = grads[0].contiguous();
    if (weight->trainable) {
      const GradTarget target = weight->store->grad_target(*weight);
      linear_weight_grad(dy, context->get_saved_variables()[0], target.tensor, target.beta);
      weight->store->grad_ready(*weight);
    }
    if (bias->trainable) {
      const GradTarget target = bias->store->grad_target(*bias);
      bias_grad(dy, target.tensor, target.beta);
      bias->store->grad_ready(*bias);
    }
    const AcquiredValue w(weight);
    return {linear_input_grad(dy, w.value()), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Dense::Dense(const ModelConfig& config, int64_t outputs) {
  const int64_t inputs = config.transformer.hidden_size;
  weight_.local_shape = weight_.global_shape = {outputs, inputs};
  weight_.init = config.transformer.weight_init(outputs, inputs);
  bias_.local_shape = bias_.global_shape = {outputs};
  bias_.role = ParameterRole::kBias;
  for (Parameter* parameter : {&weight_, &bias_})
    if (config.sequence_parallel) parameter->placement.partial_grad.insert(Axis::kTensor);
  add("weight", &weight_);
  add("bias", &bias_);
}

at::Tensor Dense::forward(const at::Tensor& x) {
  const at::Tensor input = x.to(weight_.value.scalar_type()).contiguous();
  return DenseFunction::apply(input, anchor(), &weight_, &bias_);
}

}  // namespace megatron
