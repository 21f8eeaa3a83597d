// Activation functions of the MLP. Computed in fp32 (fp64 for fp64) and rounded once. Each element
// is computed independently of its position, so that the result does not depend on how rows are
// distributed over threads (that of ATen's GELU does, through its vector tails).
//
//   kGelu          y = x Phi(x) = x (1 + erf(x / sqrt(2))) / 2  x [rows, f]
//   kGeluTanh      y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//   kRelu          y = max(x, 0)
//   kSquaredRelu   y = max(x, 0)^2
//   kQuickGelu     y = x * sigmoid(1.702 x)
//   kSwiglu        y = silu(x1) * x2                            x [rows, 2 f] = [x1 | x2],
//                                                               y [rows, f]
//   kGeglu         y = gelu_tanh(x1) * x2
//   kQuickGeglu    y = x1 * sigmoid(1.702 x1) * (x2 + offset)
//   kExactGeglu    y = x1 Phi(x1) * x2
//
// A new one: its function and slope in detail/activation_math.h, its value here and in the switches
// of activation_cpu.cc and activation.cu (gated: is_gated(), fp8/fp8_activation.cu), its flag in
// transformer/config/feed_forward.h, and its choice in TransformerConfig::activation(). Names of
// Hugging Face: interop/huggingface/hf_families.cc.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

enum class Activation {
  kGelu,
  kGeluTanh,
  kRelu,
  kSquaredRelu,
  kSwiglu,
  kGeglu,
  kQuickGeglu,
  kExactGeglu,
  kQuickGelu
};

bool is_gated(Activation activation);  // the input has twice the width of the output: [gate | up]

struct ActivationArgs {
  Activation kind = Activation::kSwiglu;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t features = 0;  // f
  double offset = 0.0;
  const void* x = nullptr;
  const void* dy = nullptr;  // [rows, f], backward only
  void* out = nullptr;       // y [rows, f] or dx (shape of x), assigned
  float* amax = nullptr;     // [1] or null: raised to the largest |out|
};
void activation_forward_cpu(const ActivationArgs& args, int64_t row_begin, int64_t row_end);
void activation_backward_cpu(const ActivationArgs& args, int64_t row_begin, int64_t row_end);
void activation_forward_cuda(const ActivationArgs& args, void* stream);
void activation_backward_cuda(const ActivationArgs& args, void* stream);

}  // namespace megatron
