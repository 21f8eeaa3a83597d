// LayerNorm or RMSNorm with its parameters. Their gradients are summed as nn/reduction.h derives it
// from their placement, over tensor ranks too where these hold different rows (sequence_parallel)
// or heads (QKNorm).
#pragma once

#include "megatron/nn/module.h"
#include "megatron/tensor/norm.h"

namespace megatron {

struct NormOptions {
  Normalization kind = Normalization::kLayerNorm;
  double eps = 1e-5;
  bool zero_centered = false;  // --apply-layernorm-1p: the stored weight is the scale minus 1
  // A tensor-parallel rank sees part of the rows (of the sequence, or its own heads): gradients are
  // partial sums.
  bool partial_over_tensor = false;
  ParameterRole role = ParameterRole::kNorm;
  bool bias = true;  // of a LayerNorm
};

// The weight and bias of a norm over `size` features. Held by Norm and by linears that contain
// their norm.
struct NormParameters {
  NormParameters(int64_t size, const NormOptions& options);
  NormOptions options;
  Parameter weight;  // [size]
  Parameter bias;    // [size]; only LayerNorm
  // Null: it has none.
  Parameter* bias_or_null() {
    return options.kind == Normalization::kLayerNorm && options.bias ? &bias : nullptr;
  }
};

// Forward and backward with the parameters' values and gradient targets, for autograd functions
// that contain a norm.
NormResult norm_forward(NormParameters& norm, const at::Tensor& x, const at::Tensor& amax = {});
at::Tensor norm_apply(NormParameters& norm, const at::Tensor& x, const at::Tensor& mean,
                      const at::Tensor& rstd);
at::Tensor norm_backward(NormParameters& norm, const at::Tensor& dy, const at::Tensor& x,
                         const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& residual_grad = {});

// Parameters: weight, bias (LayerNorm, unless NormOptions says no).
class Norm : public Module {
 public:
  Norm(int64_t size, const NormOptions& options);
  //   x [..., size]; returns the same shape and type. Differentiable.
  at::Tensor forward(const at::Tensor& x);

 private:
  NormParameters parameters_;
};

}  // namespace megatron
