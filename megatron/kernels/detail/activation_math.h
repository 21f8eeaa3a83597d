// The scalar formulas of kernels/activation.h, shared by the CPU and CUDA kernels.
#pragma once

#include "megatron/kernels/detail/math.h"

namespace megatron {

// e^x and 1 / (1 + e^-x). CUDA uses its approximate instructions: their error (2 ulp of the
// exponent's argument) is far below the rounding of the result to bf16, and gradients need not be
// bit-equal to the CPU's.
#ifdef __CUDA_ARCH__
MEGATRON_HOST_DEVICE float near_exp(float x) { return __expf(x); }
MEGATRON_HOST_DEVICE float near_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
#else
MEGATRON_HOST_DEVICE float near_exp(float x) { return fast_exp(x); }
MEGATRON_HOST_DEVICE float near_sigmoid(float x) { return fast_sigmoid(x); }
#endif
MEGATRON_HOST_DEVICE double near_exp(double x) { return fast_exp(x); }
MEGATRON_HOST_DEVICE double near_sigmoid(double x) { return fast_sigmoid(x); }

// act(x) and its derivative. Gated: y = act(x1) (x2 + offset), dx1 = dy slope (x2 + offset), dx2 =
// dy act.
template <class Acc>
struct GateValue {
  Acc act;
  Acc slope;
};

struct SiluGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc s = near_sigmoid(x);
    return {x * s, s * (Acc(1) + x * (Acc(1) - s))};
  }
};

struct QuickGeluGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc s = near_sigmoid(Acc(1.702) * x);
    return {x * s, s * (Acc(1) + Acc(1.702) * x * (Acc(1) - s))};
  }
};

// gelu_tanh(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanhGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc two_k = Acc(1.5957691216057308), cubic = Acc(0.044715);
    const Acc square = x * x;
    const Acc s = near_sigmoid(two_k * x * (Acc(1) + cubic * square));
    return {x * s, s + x * s * (Acc(1) - s) * two_k * (Acc(1) + Acc(3) * cubic * square)};
  }
};

// The normal distribution function; relative error stays small in the left tail.
MEGATRON_HOST_DEVICE float normal_cdf(float x) {
  const float a = x * 0.70710678f;
  const float t = a < 0.0f ? -a : a;
  const float s = a * a;
  // erfc(t) = exp(p(t)) for t > 0.92, and erf(a) = a + a q(s) below: minimax polynomials.
  float p = fused(-1.72853470e-5f, t, 3.83197126e-4f);
  p = fused(p, s, fused(-3.88396438e-3f, t, 2.42546219e-2f));
  p = fused(p, t, -1.06777877e-1f);
  p = fused(p, t, -6.34846687e-1f);
  p = fused(p, t, -1.28717512e-1f);
  const float tail = 0.5f * near_exp(fused(p, t, -t));
  float q = -5.96761703e-4f;
  q = fused(q, s, 4.99119423e-3f);
  q = fused(q, s, -2.67681349e-2f);
  q = fused(q, s, 1.12819925e-1f);
  q = fused(q, s, -3.76125336e-1f);
  q = fused(q, s, 1.28379166e-1f);
  const float middle = fused(0.5f, fused(q, a, a), 0.5f);
  const float outer = a < 0.0f ? tail : 1.0f - tail;
  return t > 0.921875f ? outer : middle;
}
MEGATRON_HOST_DEVICE double normal_cdf(double x) { return 0.5 * erfc(-0.70710678118654752440 * x); }

struct GeluGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc cdf = normal_cdf(x);
    const Acc density = Acc(0.39894228040143267794) * near_exp(Acc(-0.5) * x * x);
    return {x * cdf, cdf + x * density};
  }
};

struct ReluGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    return {x < Acc(0) ? Acc(0) : x, x > Acc(0) ? Acc(1) : Acc(0)};
  }
};

struct SquaredReluGate {
  template <class Acc>
  MEGATRON_HOST_DEVICE static GateValue<Acc> at(Acc x) {
    const Acc positive = x < Acc(0) ? Acc(0) : x;
    return {positive * x, Acc(2) * positive};
  }
};

}  // namespace megatron
