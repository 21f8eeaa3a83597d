#include "megatron/tensor/experts/weighted_activation.h"

#include "megatron/base/check.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// x in the type of the sums, within its bounds.
at::Tensor bounded(const at::Tensor& x, const ExpertActivation& activation) {
  const at::Tensor wide = x.to(accumulate_type(x));
  if (!activation.clamp) return wide;
  MEGATRON_ASSERT(is_gated(activation.kind), "a clamp of an activation that is not gated");
  const double c = *activation.clamp;
  const std::vector<at::Tensor> halves = wide.chunk(2, -1);
  return at::cat({halves[0].clamp_max(c), halves[1].clamp(-c, c)}, -1);
}

// Where a bound holds, x has no gradient.
at::Tensor inside_bounds(const at::Tensor& dx, const at::Tensor& x,
                         const ExpertActivation& activation) {
  if (!activation.clamp) return dx;
  const double c = *activation.clamp;
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  const at::Tensor inside = at::cat({halves[0].le(c), halves[1].abs().le(c)}, -1);
  return at::where(inside, dx, 0.0);
}

void check_rows(const at::Tensor& x, const at::Tensor& weights) {
  check_shape("input of the activation of experts", x, {-1, -1});
  check_shape("weights of rows", weights, {x.size(0)});
  MEGATRON_ASSERT(weights.scalar_type() == accumulate_type(x), "weights of rows are ",
                  c10::toString(weights.scalar_type()), " beside ", c10::toString(x.scalar_type()));
}

}  // namespace

at::Tensor weighted_activation(const at::Tensor& x, const at::Tensor& weights,
                               const ExpertActivation& activation) {
  const at::NoGradGuard no_grad;
  check_rows(x, weights);
  const at::Tensor y =
      activation_forward(bounded(x, activation), activation.kind, activation.offset);
  return y.mul_(weights.unsqueeze(1)).to(x.scalar_type());
}

WeightedActivationGrads weighted_activation_backward(const at::Tensor& dy, const at::Tensor& x,
                                                     const at::Tensor& weights,
                                                     const ExpertActivation& activation,
                                                     bool with_y) {
  const at::NoGradGuard no_grad;
  check_rows(x, weights);
  const at::Tensor wide = bounded(x, activation), grad = dy.to(wide.scalar_type());
  const at::Tensor act = activation_forward(wide, activation.kind, activation.offset);
  const at::Tensor weight = weights.unsqueeze(1);
  const at::Tensor dx =
      activation_backward(grad * weight, wide, activation.kind, activation.offset);
  WeightedActivationGrads result;
  result.dx = inside_bounds(dx, x, activation).to(x.scalar_type());
  result.dweights = (act * grad).sum(-1);
  if (with_y) result.y = (act * weight).to(x.scalar_type());
  return result;
}

}  // namespace megatron
