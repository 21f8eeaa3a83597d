// The scalar formulas of kernels/experts/weighted_activation.h, shared by the CPU and CUDA kernels.
#pragma once

#include "megatron/kernels/detail/activation_math.h"

namespace megatron {

// NaN stays NaN.
template <class Acc>
MEGATRON_HOST_DEVICE Acc at_most(Acc x, Acc limit) {
  return x > limit ? limit : x;
}
template <class Acc>
MEGATRON_HOST_DEVICE Acc within(Acc x, Acc limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

// One element: act(x), and its gradients for the gradient `grad` of act(x).
template <class Acc>
struct GatedElement {
  Acc act, dgate, dup;
};
template <class Gate, class Acc>
MEGATRON_HOST_DEVICE GatedElement<Acc> gated_element(Acc gate, Acc up, Acc offset, Acc limit,
                                                     Acc grad) {
  const GateValue<Acc> value = Gate::at(at_most(gate, limit));
  const Acc factor = within(up, limit) + offset;
  const Acc dgate = grad * value.slope * factor, dup = grad * value.act;
  return {value.act * factor, gate > limit ? Acc(0) : dgate,
          up > limit || up < -limit ? Acc(0) : dup};
}

}  // namespace megatron
