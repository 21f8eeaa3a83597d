// The activation of an expert (kernels/activation.h) times the weight of its row:
//
//   y = w act(x)        w [rows] in fp32 (fp64); act gated or not
//
// Computed in fp32 (fp64 for fp64) and rounded once. A finite `limit` c of a gated activation
// bounds its input first: the gate to at most c, the other half to -c ... c, before the offset is
// added (gpt-oss); where a bound holds, the gradient is 0. The gradient of w is a sum over the row
// in an order that depends on its length alone.
#pragma once

#include <cstdint>
#include <limits>

#include "megatron/kernels/activation.h"

namespace megatron {

struct WeightedActivationArgs {
  Activation kind = Activation::kSwiglu;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t features = 0;  // f
  double offset = 0.0;
  double limit = std::numeric_limits<double>::infinity();
  const void* x = nullptr;        // [rows, f], or [rows, 2 f] = [gate | up]
  const void* weights = nullptr;  // [rows] fp32 (fp64)
  const void* dy = nullptr;       // [rows, f], backward only
  void* y = nullptr;              // [rows, f]; in the backward null, or assigned once more
  void* dx = nullptr;             // shaped as x, backward only
  void* dweights = nullptr;       // [rows] fp32 (fp64), backward only
  float* dx_amax = nullptr;       // [rows], backward only: largest |dx| of the row, or null
};
void weighted_activation_forward_cpu(const WeightedActivationArgs& args, int64_t row_begin,
                                     int64_t row_end);
void weighted_activation_backward_cpu(const WeightedActivationArgs& args, int64_t row_begin,
                                      int64_t row_end);
void weighted_activation_forward_cuda(const WeightedActivationArgs& args, void* stream);
void weighted_activation_backward_cuda(const WeightedActivationArgs& args, void* stream);

}  // namespace megatron
