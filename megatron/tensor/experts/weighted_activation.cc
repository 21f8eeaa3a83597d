#include "megatron/tensor/experts/weighted_activation.h"

#include "megatron/base/check.h"
#include "megatron/kernels/experts/weighted_activation.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

void check_rows(const at::Tensor& x, const at::Tensor& weights,
                const ExpertActivation& activation) {
  MEGATRON_ASSERT(!activation.clamp || is_gated(activation.kind),
                  "a clamp of an activation that is not gated");
  check_shape("input of the activation of experts", x, {-1, -1});
  check_shape("weights of rows", weights, {x.size(0)});
  MEGATRON_ASSERT(weights.scalar_type() == accumulate_type(x), "weights of rows are ",
                  c10::toString(weights.scalar_type()), " beside ", c10::toString(x.scalar_type()));
}

WeightedActivationArgs make_args(const at::Tensor& x, const at::Tensor& weights,
                                 const ExpertActivation& activation) {
  WeightedActivationArgs args;
  args.kind = activation.kind;
  args.dtype = to_dtype(x.scalar_type());
  args.rows = x.size(0);
  args.features = is_gated(activation.kind) ? x.size(1) / 2 : x.size(1);
  args.offset = activation.offset;
  if (activation.clamp) args.limit = *activation.clamp;
  args.x = x.const_data_ptr();
  args.weights = weights.const_data_ptr();
  return args;
}

}  // namespace

at::Tensor weighted_activation(const at::Tensor& x, const at::Tensor& weights,
                               const ExpertActivation& activation) {
  const at::NoGradGuard no_grad;
  check_rows(x, weights, activation);
  const at::Tensor in = x.contiguous(), factors = weights.contiguous();
  WeightedActivationArgs args = make_args(in, factors, activation);
  at::Tensor y = at::empty({args.rows, args.features}, in.options());
  args.y = y.data_ptr();
  launch(
      in, args.rows, in.size(1),
      [&](int64_t begin, int64_t end) { weighted_activation_forward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(weighted_activation_forward_cuda(args, stream)); });
  return y;
}

WeightedActivationGrads weighted_activation_backward(const at::Tensor& dy, const at::Tensor& x,
                                                     const at::Tensor& weights,
                                                     const ExpertActivation& activation,
                                                     WeightedActivationExtras wanted) {
  const at::NoGradGuard no_grad;
  check_rows(x, weights, activation);
  const at::Tensor in = x.contiguous(), factors = weights.contiguous(), grad = dy.contiguous();
  WeightedActivationArgs args = make_args(in, factors, activation);
  check_shape("gradient of the activation of experts", grad, {args.rows, args.features});
  WeightedActivationGrads result{at::empty_like(in), at::empty_like(factors), {}, {}};
  if (wanted.y) result.y = at::empty_like(grad);
  if (wanted.amax) result.amax = at::empty({args.rows}, in.options().dtype(at::kFloat));
  args.dy = grad.const_data_ptr();
  args.dx = result.dx.data_ptr();
  args.dweights = result.dweights.data_ptr();
  if (wanted.y) args.y = result.y.data_ptr();
  if (wanted.amax) args.dx_amax = result.amax.data_ptr<float>();
  launch(
      in, args.rows, 2 * in.size(1),
      [&](int64_t begin, int64_t end) { weighted_activation_backward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(weighted_activation_backward_cuda(args, stream)); });
  return result;
}

}  // namespace megatron
