// What the forward and backward of one linear layer share, in the model's type and quantised.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/norm.h"
#include "megatron/tensor/activation.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/divided_rows.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/overlapped_linear.h"

namespace megatron {

// Quantised copies of a weight, reused as long as its value does not change.
struct WeightCodes {
  QuantizedTensor codes;
  const ParameterStore* store = nullptr;
  int64_t version = -1;
  at::Tensor amax;  // delayed scaling: the weight's amax, until a step records it
  // Where inputs have a scale for each row, else undefined: with_row_scales(codes.rows).scale, and
  // no_scale()
  at::Tensor row_scales, no_scale;
};

// A gradient whose amax was measured by the kernel that computed it; or one that exists only in
// quantised form: the kernel wrote no tensor of this shape.
struct MeasuredGradient {
  at::Tensor gradient, amax;
  QuantizedTensor codes = {};
  std::vector<int64_t> shape = {};
};

// Lives as long as the layer, which must outlive its graphs. Every autograd function takes an
// anchor() besides x, so that its weights are trained even if x needs no gradient.
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
  LinearState* input_from = nullptr;  // the layer whose output the input activation takes, if known
  LinearState* output_to = nullptr;   // the layer with this one as `input_from`
  WeightCodes weight_codes = {};
  LoraAdapter* lora = nullptr;
  std::shared_ptr<PeerMailbox> mailbox = {};
  std::shared_ptr<GatheredRows> input_rows = {};  // in flight: prefetched in backward
  MeasuredGradient measured = {};  // this layer's output gradient, if the next layer measured it
  at::Tensor output_factors = {};  // of rows of the output, if `output_to` is to apply them
};

// run_weight_gradient() with dy^T x; `x` is called when the product is computed.
void accumulate_weight_grad(Parameter& weight, const at::Tensor& dy,
                            const std::function<at::Tensor()>& x);
void accumulate_bias_grad(Parameter* bias, const at::Tensor& dy);

// Whether the rows of this forward have adapters of this linear.
bool has_row_adapters(const LinearState& state);

// Whether tensor ranks hold rows of their own of what is between the products: under sequence
// parallelism, or while rows are divided.
inline bool divides_rows(const LinearState& state) {
  return state.sequence_parallel || (DividedRows::current() != nullptr && state.tp->size() > 1);
}
// The output of a column-parallel product without what was added to divide its rows.
inline at::Tensor of_all_rows(const LinearState& state, const at::Tensor& y) {
  const DividedRows* const rows = DividedRows::current();
  return rows != nullptr && state.tp->size() > 1 ? rows->without_filling(y) : y;
}

// x; where rows are divided, all-gathered over the tensor ranks, with what was added to divide
// them.
at::Tensor gathered(const LinearState& state, const at::Tensor& x);

// Starts the sum of `x` [s, ...] over the tensor ranks; after wait() `x` is this rank's share: its
// rows [s/t, ...] where they are divided, else the whole sum. Null with one rank.
std::shared_ptr<Work> sum_over_ranks(const LinearState& state, at::Tensor& x);

// This rank's share (sum_over_ranks) of the sum of y, + bias, + residual; `factors`: of the rows of
// this rank's y, which are multiplied by them first. All but y may be undefined.
at::Tensor summed_over_ranks(const LinearState& state, at::Tensor y, const at::Tensor& bias,
                             const at::Tensor& residual, const at::Tensor& factors = {});

// Whether a product of few rows can have the layer's norm: there is none, or an RMSNorm, which is
// added to `around`; `gain` must be kept until the product is launched.
bool add_norm(const LinearState& state, AroundProduct& around, std::optional<AcquiredValue>& gain);

// An optional residual as an argument of an autograd function, which takes no undefined tensors,
// and the gradient that its backward returns for it.
inline std::optional<at::Tensor> optional_residual(const at::Tensor& residual) {
  return residual.defined() ? std::optional<at::Tensor>(residual) : std::nullopt;
}
inline at::Tensor residual_grad(torch::autograd::AutogradContext* context, const at::Tensor& dy) {
  return context->saved_data["residual"].toBool() ? dy : at::Tensor();
}

// The layers with quantised operands, as autograd functions: they return {y, x for the residual}
// and y.
torch::autograd::variable_list quantized_column_forward(const at::Tensor& x, LinearState& state);
at::Tensor quantized_row_forward(const at::Tensor& x, const at::Tensor& residual,
                                 LinearState& state, bool is_activated);
// What this rank computes of y, with the norm and, on one rank, the bias, + addend; where a kernel
// of few rows does it, else undefined. See Note [Few rows].
at::Tensor quantized_few_rows(const at::Tensor& x, const at::Tensor& addend, LinearState& state,
                              bool swiglu);

}  // namespace megatron
