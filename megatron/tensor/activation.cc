#include "megatron/tensor/activation.h"

#include "megatron/base/check.h"
#include "megatron/kernels/activation.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

ActivationKernel kernel_of(Activation activation) {
  switch (activation) {
    case Activation::kGelu: return ActivationKernel::kGelu;
    case Activation::kGeluTanh: return ActivationKernel::kGeluTanh;
    case Activation::kSquaredRelu: return ActivationKernel::kSquaredRelu;
    case Activation::kSwiglu: return ActivationKernel::kSwiglu;
    case Activation::kGeglu: return ActivationKernel::kGeglu;
    case Activation::kQuickGeglu: return ActivationKernel::kQuickGeglu;
  }
  throw InternalError(cat("internal error: activation ", static_cast<int>(activation), " has no kernel"));
}

ActivationArgs make_args(const at::Tensor& x, Activation activation, double offset, const at::Tensor& out) {
  ActivationArgs args;
  args.kind = kernel_of(activation);
  args.dtype = to_dtype(x.scalar_type());
  args.features = is_gated(activation) ? x.size(-1) / 2 : x.size(-1);
  args.rows = x.numel() / x.size(-1);
  args.offset = offset;
  args.x = x.const_data_ptr();
  args.out = out.data_ptr();
  return args;
}

class ActivationFunction : public torch::autograd::Function<ActivationFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t activation,
                            double offset) {
    const at::Tensor in = x.contiguous();
    context->save_for_backward({in});
    context->saved_data["activation"] = activation;
    context->saved_data["offset"] = offset;
    return activation_forward(in, static_cast<Activation>(activation), offset);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const at::Tensor x = context->get_saved_variables()[0];
    const auto activation = static_cast<Activation>(context->saved_data["activation"].toInt());
    return {activation_backward(grads[0], x, activation, context->saved_data["offset"].toDouble()),
            {}, {}};
  }
};

}  // namespace

at::Tensor activation_forward(const at::Tensor& x, Activation activation, double offset,
                              const at::Tensor& amax) {
  std::vector<int64_t> shape = x.sizes().vec();
  if (is_gated(activation)) shape.back() /= 2;
  at::Tensor y = at::empty(shape, x.options());
  ActivationArgs args = make_args(x, activation, offset, y);
  if (amax.defined()) args.amax = amax.data_ptr<float>();
  launch(
      x, args.rows, x.size(-1), [&](int64_t begin, int64_t end) { activation_forward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(activation_forward_cuda(args, stream)); });
  return y;
}

at::Tensor activation_backward(const at::Tensor& dy, const at::Tensor& x, Activation activation, double offset,
                               const at::Tensor& amax) {
  const at::Tensor grad = dy.contiguous();
  at::Tensor dx = at::empty_like(x);
  ActivationArgs args = make_args(x, activation, offset, dx);
  args.dy = grad.const_data_ptr();
  if (amax.defined()) args.amax = amax.data_ptr<float>();
  launch(
      x, args.rows, 2 * x.size(-1),
      [&](int64_t begin, int64_t end) { activation_backward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(activation_backward_cuda(args, stream)); });
  return dx;
}

bool is_gated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kGeglu ||
         activation == Activation::kQuickGeglu;
}

at::Tensor activate(const at::Tensor& x, Activation activation, double offset) {
  MEGATRON_ASSERT(x.dim() >= 1 && x.size(-1) > 0, "activation of a tensor without features");
  MEGATRON_ASSERT(!is_gated(activation) || x.size(-1) % 2 == 0, "gated activation of the odd width ", x.size(-1));
  return ActivationFunction::apply(x, static_cast<int64_t>(activation), offset);
}

}  // namespace megatron
