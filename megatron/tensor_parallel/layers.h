// Linear layers whose weights are split over the tensor-parallel group.
#pragma once

#include <memory>
#include <optional>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/norm.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/quantization_options.h"
#include "megatron/tensor_parallel/lora_adapter.h"

namespace megatron {

class ColumnParallelLinear;

struct LinearOptions {
  bool bias = true;
  FixedZeros bias_zeros = {};  // column-parallel only
  Init init;
  bool sequence_parallel = false;
  ParameterRole role = ParameterRole::kWeight;
  // Column-parallel only: sizes of the output parts that are split one by one (a gated FC1 is {ffn,
  // ffn}).
  std::vector<int64_t> parts = {};
  // Column-parallel only: false: every tensor rank holds the whole weight and multiplies the rows
  // that it has; there is no communication.
  bool divided = true;
  // Column-parallel only: apply this norm to the input first; its parameters are layer_norm_weight
  // and layer_norm_bias.
  bool input_norm = false;
  NormOptions norm = {};
  bool recompute_norm = false;  // save the norm's input and statistics, not its output
  // Row-parallel only: apply this activation to the input first. The input is [s, b, 2k/t] when the
  // activation is gated.
  std::optional<Activation> input_activation = {};
  double activation_offset = 0.0;
  // With input_activation: recompute the activation in the backward instead of saving its output
  // (quantised, if the layer is) as well.
  bool recompute_activation = true;
  // Row-parallel only: the layer whose output the activation takes; must outlive this one. If both
  // are quantised, the amax of its output gradient is measured by the kernel that computes it.
  ColumnParallelLinear* input_from = nullptr;
  // FP8 or FP4 operands in the three products of the layer; see
  // tensor_parallel/quantized_linear.cc.
  QuantizationOptions quantization = {};
  // A low-rank adapter in parallel to the weight: parameters lora_A.weight and lora_B.weight.
  LoraOptions lora = {};
};

// Output of a sublayer, and its input for the residual connection.
struct SublayerOutput {
  at::Tensor output, residual;
};

// Linear layer whose output features are split over the tensor-parallel group: Y = norm(X) A^T + b.
//
//   x       [s, b, k]      ([s/t, b, k] with sequence_parallel)
//   return  [s, b, n/t]    this rank's columns of Y
//   weight  [n/t, k]       shards: dim 0 over kTensor
//
// Communication: forward none (all-gather of x with sequence_parallel); backward all-reduce of dX
// (reduce-scatter), overlapped with the weight gradient. The weight gradient goes into the
// parameter's target; autograd sees dX only. Throws Error if n is not divisible by t. Source:
// Shoeybi et al. 2019 (arXiv:1909.08053) section 3; Korthikanti et al. 2022 (arXiv:2205.05198).
class ColumnParallelLinear : public Module {
 public:
  ColumnParallelLinear(std::string name, int64_t input_size, int64_t output_size,
                       const LinearOptions& options, const ParallelGroups& groups);
  // Shares the weight of another module (a tied embedding [v/t, h]), which must outlive this one;
  // no bias, no norm. x may have another floating-point type than the weight.
  ColumnParallelLinear(Parameter& weight, bool sequence_parallel, const ParallelGroups& groups);
  ~ColumnParallelLinear() override;
  at::Tensor forward(const at::Tensor& x);
  // Also returns x for the residual path, so that the norm's backward adds the residual gradient in
  // the same kernel. `input`, unless null, becomes what prefetch_input_in_backward() takes, or
  // undefined.
  SublayerOutput forward_with_residual(const at::Tensor& x, at::Tensor* input = nullptr);
  // The same with SwiGLU of the output [gate | up] behind it, where one kernel does it all: the few
  // rows of decoding on a GPU. Else null.
  std::optional<SublayerOutput> forward_swiglu(const at::Tensor& x);
  // Identity; x must have been computed from this layer's output. In the backward it starts the
  // all-gather of `input` that the weight gradient needs, so that it overlaps with the backward of
  // what lies between. Nothing is started without a mailbox that fits `input`, without sequence
  // parallelism, or if the weight gradient is deferred. No other backward through this layer may
  // run in between.
  at::Tensor prefetch_input_in_backward(const at::Tensor& x, const at::Tensor& input);
  // norm(X) alone, in the weight's type; X without a norm. Not differentiable.
  at::Tensor normed(const at::Tensor& x);
  Parameter& weight();
  // The value of the weight, with what an adapter adds to it. Not differentiable.
  at::Tensor with_adapter(const at::Tensor& weight);

 private:
  friend class RowParallelLinear;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Linear layer whose input features are split over the tensor-parallel group: Y = sum over ranks of
// X_r A_r^T, + b, where X = activation(input) if input_activation is set.
//
//   x       [s, b, k/t]
//   return  [s, b, n]      ([s/t, b, n] with sequence_parallel)
//   weight  [n, k/t]       shards: dim 1 over kTensor
//
// Communication: forward all-reduce of Y (reduce-scatter with sequence_parallel); backward none
// (all-gather of dY). Throws Error if k is not divisible by t.
class RowParallelLinear : public Module {
 public:
  RowParallelLinear(std::string name, int64_t input_size, int64_t output_size,
                    const LinearOptions& options, const ParallelGroups& groups);
  ~RowParallelLinear() override;
  // `residual`: added to Y unless undefined; has the result's shape and the weight's type.
  at::Tensor forward(at::Tensor x, const at::Tensor& residual = {});
  // The same of an input that is activated already.
  at::Tensor forward_activated(const at::Tensor& x, const at::Tensor& residual = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
