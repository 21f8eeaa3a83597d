#include "megatron/transformer/moe/router_product.h"

#include "megatron/nn/functional.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The GPU's library sums products of bf16 in fp32 and can return that.
bool sums_in_product(const at::Tensor& a, at::ScalarType type) {
  return a.is_cuda() && a.scalar_type() == at::kBFloat16 && type == at::kFloat;
}

// a b, in `type`.
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  if (is_batch_invariant()) return linear_forward(a.to(type), b.to(type).t(), {});
  return sums_in_product(a, type) ? at::mm(a, b, type) : a.to(type).mm(b.to(type));
}

// Note [Gradients of logits in two parts] A product takes operands of one type. An fp32 gradient
// that meets a bf16 operand is the sum of two bf16 numbers to 2^-17: the products with both cost
// less than converting the other operand to fp32, the gradient being narrow.
// [N, 2 E], once for both products.
at::Tensor in_two_parts(const at::Tensor& gradient) {
  const int64_t width = gradient.size(1);
  at::Tensor parts =
      at::empty({gradient.size(0), 2 * width}, gradient.options().dtype(at::kBFloat16));
  at::Tensor high = parts.narrow(1, 0, width), low = parts.narrow(1, width, width);
  high.copy_(gradient);
  at::sub_out(low, gradient, high);
  return parts;
}

// A gradient of logits as the products take it.
struct LogitGradient {
  LogitGradient(const at::Tensor& gradient, const at::Tensor& x)
      : type(gradient.scalar_type()),
        divided(sums_in_product(x, type)),
        operand(divided ? in_two_parts(gradient) : gradient) {}
  at::ScalarType type;
  bool divided;
  at::Tensor operand;
};

void add_weight_gradient(const LogitGradient& gradient, const at::Tensor& x,
                         const GradTarget& target) {
  const at::Tensor sum = target.to_add_to();
  if (!gradient.divided) {
    sum.add_(gradient.operand.t().mm(x.to(gradient.type)));
    return;
  }
  for (const at::Tensor& part : at::mm(gradient.operand.t(), x, at::kFloat).chunk(2))
    sum.add_(part);
}

at::Tensor input_gradient(const LogitGradient& gradient, const at::Tensor& weight) {
  if (gradient.divided) return gradient.operand.mm(at::cat({weight, weight}));
  return gradient.operand.mm(weight.to(gradient.type)).to(weight.scalar_type());
}

struct RouterProduct : torch::autograd::Function<RouterProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                            Parameter* weight, Parameter* bias, int64_t type) {
    const AcquiredValue w(weight), b(bias);
    context->saved_data["weight"] = reinterpret_cast<int64_t>(weight);
    context->saved_data["bias"] = reinterpret_cast<int64_t>(bias);
    context->saved_data["type"] = x.scalar_type();
    const at::Tensor input = x.to(w.value().scalar_type());
    context->save_for_backward({input});
    const auto wide = static_cast<at::ScalarType>(type);
    at::Tensor logits = wide_product(input, w.value().t(), wide);
    return bias == nullptr ? logits : logits.add_(b.value().to(wide));
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto* weight = reinterpret_cast<Parameter*>(context->saved_data["weight"].toInt());
    auto* bias = reinterpret_cast<Parameter*>(context->saved_data["bias"].toInt());
    const at::Tensor x = saved_for(*weight, context->get_saved_variables())[0];
    const at::Tensor gradient = grads[0].contiguous();
    const LogitGradient parts(gradient, x);
    at::Tensor dx;
    if (context->needs_input_grad(0)) {
      const AcquiredValue w(weight);
      dx = input_gradient(parts, w.value()).to(context->saved_data["type"].toScalarType());
    }
    run_weight_gradient(
        *weight, [parts, x](const GradTarget& target) { add_weight_gradient(parts, x, target); });
    if (bias != nullptr)
      run_weight_gradient(*bias, [gradient](const GradTarget& target) {
        target.to_add_to().add_(gradient.sum(0));
      });
    return {dx, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor router_logits(const at::Tensor& x, Parameter& weight, Parameter* bias,
                         at::ScalarType type) {
  return RouterProduct::apply(x.reshape({-1, x.size(-1)}), anchor(), &weight, bias,
                              static_cast<int64_t>(type));
}

}  // namespace megatron
