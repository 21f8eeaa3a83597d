// The scalar formulas of kernels/activation.h, shared by the CPU and CUDA kernels.
#pragma once

#include "megatron/kernels/detail/math.h"

namespace megatron {

// act(x1) and its derivative, so that y = act * (x2 + offset), dx1 = dy * slope * (x2 + offset), dx2 = dy * act.
template <class Acc>
struct GateValue {
  Acc act;
  Acc slope;
};

struct SiluGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc s = fast_sigmoid(x);
    return {x * s, s * (Acc(1) + x * (Acc(1) - s))};
  }
};

struct QuickGeluGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc s = fast_sigmoid(Acc(1.702) * x);
    return {x * s, s * (Acc(1) + Acc(1.702) * x * (Acc(1) - s))};
  }
};

// gelu_tanh(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanhGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc two_k = Acc(1.5957691216057308), cubic = Acc(0.044715);
    const Acc square = x * x;
    const Acc s = fast_sigmoid(two_k * x * (Acc(1) + cubic * square));
    return {x * s, s + x * s * (Acc(1) - s) * two_k * (Acc(1) + Acc(3) * cubic * square)};
  }
};

}  // namespace megatron
