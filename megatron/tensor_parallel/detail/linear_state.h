// What the forward and backward of one linear layer share, in the model's type and quantised.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/nn/norm.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/overlapped_linear.h"

namespace megatron {

// A weight in codes, kept while its value stays.
struct WeightCodes {
  QuantizedTensor codes;
  const ParameterStore* store = nullptr;
  int64_t version = -1;
  at::Tensor amax;  // delayed scaling: the weight's largest value, where no step has it yet
};

// A gradient whose largest value was measured by the kernel that made it; or one that was never
// written but as codes, of this shape, and has no tensor.
struct MeasuredGradient {
  at::Tensor gradient, amax;
  QuantizedTensor codes = {};
  std::vector<int64_t> shape = {};
};

// Lives as long as the layer, which must outlive its graphs. Every function takes an anchor()
// besides x, so that its weights are trained although x needs no gradient.
struct LinearState {
  Parameter* weight = nullptr;
  Parameter* bias = nullptr;
  NormParameters* norm = nullptr;
  const ProcessGroup* tp = nullptr;
  bool sequence_parallel = false;
  bool recompute_norm = false;
  std::optional<Activation> input_activation = {};
  double activation_offset = 0.0;
  bool recompute_activation = true;
  QuantizationOptions quantization = {};
  LinearState* input_from = nullptr;  // the layer that the input activation is applied to, if known
  WeightCodes weight_codes = {};
  LoraAdapter* lora = nullptr;
  std::shared_ptr<PeerMailbox> mailbox = {};
  std::shared_ptr<GatheredRows> input_rows = {};  // in flight: prefetched in backward
  MeasuredGradient measured = {};  // the gradient of this layer's output, if its maker measured it
};

// Computes a weight gradient and reports it; now, or as an action of its own under a zero-bubble
// schedule. `accumulate` adds to the target it is given.
void run_weight_gradient(Parameter& weight, std::function<void(const GradTarget&)> accumulate);

// The same with dy^T x; `x` is asked for when the product is computed.
void accumulate_weight_grad(Parameter& weight, const at::Tensor& dy,
                            const std::function<at::Tensor()>& x);
void accumulate_bias_grad(Parameter* bias, const at::Tensor& dy);

// x with the rows of all tensor ranks under sequence parallelism.
at::Tensor gathered(const LinearState& state, const at::Tensor& x);

// The sum over several ranks of their `x` [s, ...], under way; `x` becomes what this rank has of
// it: its rows [s/t, ...] under sequence parallelism, else all. Null with one rank.
std::shared_ptr<Work> sum_over_ranks(const LinearState& state, at::Tensor& x);

// A residual as an autograd function takes it, which knows no undefined tensors, and what its
// backward gives for it.
inline std::optional<at::Tensor> optional_residual(const at::Tensor& residual) {
  return residual.defined() ? std::optional<at::Tensor>(residual) : std::nullopt;
}
inline at::Tensor residual_grad(torch::autograd::AutogradContext* context, const at::Tensor& dy) {
  return context->saved_data["residual"].toBool() ? dy : at::Tensor();
}

// The layers with quantised operands, as autograd functions: {y, x for what goes around}, and y.
torch::autograd::variable_list quantized_column_forward(const at::Tensor& x, LinearState& state);
at::Tensor quantized_row_forward(const at::Tensor& x, const at::Tensor& residual,
                                 LinearState& state);

}  // namespace megatron
