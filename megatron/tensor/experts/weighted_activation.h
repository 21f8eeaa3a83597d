// The activation between the two products of an expert, times the weight of each row, so that the
// second product needs no output of its own: y = weight * act(x). Computed in fp32 (fp64) and
// rounded once; a row's result does not depend on the other rows. Not differentiable: the layers
// write their own backwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "megatron/kernels/activation.h"

namespace megatron {

// act(x) of tensor/activation.h. `clamp` c, gated only: the gate is at most c, and the other half
// lies within -c and c before the offset is added (gpt-oss; --activation-func-clamp-value).
struct ExpertActivation {
  Activation kind = Activation::kSwiglu;
  double offset = 0.0;
  std::optional<double> clamp = {};
};

//   x [n, f] ([n, 2f] when gated), weights [n] fp32 (fp64); return [n, f] in x's type
at::Tensor weighted_activation(const at::Tensor& x, const at::Tensor& weights,
                               const ExpertActivation& activation);

struct WeightedActivationGrads {
  at::Tensor dx;        // shaped like x
  at::Tensor dweights;  // [n]: the sum of act(x) * dy over the features
  at::Tensor y;         // the forward's result again, if asked for
  at::Tensor amax;      // [n] fp32: the largest magnitude of each row of dx, if asked for
};
struct WeightedActivationExtras {
  bool y = false, amax = false;
};
WeightedActivationGrads weighted_activation_backward(const at::Tensor& dy, const at::Tensor& x,
                                                     const at::Tensor& weights,
                                                     const ExpertActivation& activation,
                                                     WeightedActivationExtras wanted);

}  // namespace megatron
