// One of the two linears of the experts of a rank: its three products on rows that lie by expert,
// in the model's type or with FP8 operands (tensor/experts/grouped_quantization.h).
//
//   y = x W_e^T      dx = dy W_e      dW_e = dy^T x
//
// Scales of FP8 operands belong to an expert: current ones come from its rows on this rank, delayed
// ones from those of earlier steps on all ranks that hold it (distributed/delayed_scaling.h). What
// delayed scaling measures is recorded by the backward alone, so that neither evaluation nor a
// forward that is computed again counts.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/nn/parameter.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/quantization_options.h"
#include "megatron/transformer/moe/token_dispatcher.h"

namespace megatron {

struct ExpertActivation;
struct ExpertScales;

// Rows as the products take them: in the model's type, or quantised in the orientations that were
// asked for. A kernel that writes its result in quantised form leaves `plain` undefined.
struct ExpertOperand {
  at::Tensor plain;  // [n, c]
  QuantizedTensor codes;
  // Delayed scaling, [E/e] fp32: largest magnitudes that saved_input() records.
  at::Tensor amax = {};
  bool defined() const {
    return plain.defined() || codes.rows.defined() || codes.columns.defined();
  }
};

class ExpertLinear {
 public:
  // `weight` [E/e, n, k] must outlive this.
  ExpertLinear(Parameter& weight, const QuantizationOptions& options);

  // The input of y.
  ExpertOperand input(const at::Tensor& x, const ExpertCounts& counts) const;
  // The same from what the weighted activation takes (tensor/experts/weighted_activation.h), where
  // quantizes_activation(); and, unless only forwards run, for saved_input().
  bool quantizes_activation() const { return quantizes_weight_grad(); }
  ExpertOperand activated_input(const at::Tensor& u, const at::Tensor& weights,
                                const ExpertActivation& activation,
                                const ExpertCounts& counts) const;
  // The input of dW, from x or from what activated_input() left; records its largest magnitudes.
  ExpertOperand saved_input(const ExpertOperand& x, const ExpertCounts& counts) const;
  // The output gradient, for dx and dW; records its and the weight's largest magnitudes. `amax`
  // [n] fp32, where uses_row_amax() says so: the largest magnitude of each row.
  bool uses_row_amax() const { return options_.recipe == QuantizationRecipe::kTensorwise; }
  ExpertOperand gradient(const at::Tensor& dy, const ExpertCounts& counts,
                         const at::Tensor& amax = {}) const;

  // `value`: of the weight.
  at::Tensor forward(const ExpertOperand& x, const at::Tensor& value,
                     const ExpertCounts& counts) const;
  at::Tensor input_grad(const ExpertOperand& dy, const at::Tensor& value,
                        const ExpertCounts& counts) const;
  void weight_grad(const ExpertOperand& dy, const ExpertOperand& x, const at::Tensor& counts,
                   const GradTarget& target) const;

 private:
  bool quantizes_weight_grad() const;
  ExpertScales scales(OperandRole role, bool record) const;
  QuantizedTensor quantize(const at::Tensor& x, const ExpertCounts& counts, OperandRole role,
                           Orientations wanted, bool record, const at::Tensor& amax = {}) const;
  QuantizedTensor weight_codes(const at::Tensor& value, Orientations wanted, bool record) const;

  // Quantised copies of the weight, reused as long as its value does not change.
  struct Kept {
    QuantizedTensor codes;
    const ParameterStore* store = nullptr;
    int64_t version = -1;
    at::Tensor amax;  // delayed scaling: of the weight [E/e], until a backward records it
  };

  Parameter& weight_;
  const QuantizationOptions options_;
  mutable Kept kept_;
};

}  // namespace megatron
