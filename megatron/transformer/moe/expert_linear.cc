#include "megatron/transformer/moe/expert_linear.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/experts/grouped_gemm.h"
#include "megatron/tensor/experts/quantized_activation.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr Orientations kBoth{true, true}, kInRows{true, false}, kInColumns{false, true};

at::Tensor empty_rows(const at::Tensor& value, const at::Tensor& rows, int64_t columns) {
  return at::empty({rows.size(0), columns}, value.options());
}

}  // namespace

ExpertLinear::ExpertLinear(Parameter& weight, const QuantizationOptions& options)
    : weight_(weight), options_(options) {
  MEGATRON_CHECK(options.recipe != QuantizationRecipe::kNvfp4, weight.name,
                 ": --fp4-format with experts is not built\nhint: --fp8-format");
  weight.quantization = options.recipe;
  weight.read_unquantized = true;  // its type and shape
  if (options.recipe == QuantizationRecipe::kDelayed) weight.delayed_scaling = options.delayed;
}

bool ExpertLinear::quantizes_weight_grad() const {
  return options_.enabled() && options_.weight_gradient && weight_.trainable;
}

ExpertScales ExpertLinear::scales(OperandRole role, bool record) const {
  if (options_.recipe != QuantizationRecipe::kDelayed) return {};
  const DelayedScales* kept = weight_.store->delayed_scales(weight_);
  if (kept == nullptr) return {};
  const auto slot = static_cast<int64_t>(role);
  return {kept->state.select(1, slot).select(1, 0),
          record ? kept->amax.select(1, slot) : at::Tensor(),
          {}};
}

QuantizedTensor ExpertLinear::quantize(const at::Tensor& x, const ExpertCounts& counts,
                                       OperandRole role, Orientations wanted, bool record,
                                       const at::Tensor& amax) const {
  ExpertScales by = scales(role, record);
  by.row_amax = amax;
  return quantize_expert_rows(x, counts.rows, role, options_, wanted, by);
}

ExpertOperand ExpertLinear::input(const at::Tensor& x, const ExpertCounts& counts) const {
  if (!options_.enabled()) return {x, {}};
  return {{}, quantize(x, counts, OperandRole::kInput, kInRows, /*record=*/false)};
}

ExpertOperand ExpertLinear::activated_input(const at::Tensor& u, const at::Tensor& weights,
                                            const ExpertActivation& activation,
                                            const ExpertCounts& counts) const {
  const bool saves = !weight_.store->only_forward();
  ExpertScales by = scales(OperandRole::kInput, /*record=*/false);
  ExpertOperand input;
  if (saves && by.scale.defined())
    by.new_amax = input.amax = at::zeros({counts.rows.numel()}, by.scale.options());
  input.codes = quantized_weighted_activation(u, weights, activation, counts.rows, options_,
                                              saves ? kBoth : kInRows, by);
  return input;
}

ExpertOperand ExpertLinear::saved_input(const ExpertOperand& x, const ExpertCounts& counts) const {
  const ExpertScales by = scales(OperandRole::kInput, /*record=*/true);
  if (x.codes.columns.defined()) {
    if (x.amax.defined() && by.new_amax.defined()) {
      at::Tensor slot = by.new_amax;
      at::maximum_out(slot, slot, x.amax);
    }
    return x;
  }
  if (quantizes_weight_grad())
    return {{}, quantize(x.plain, counts, OperandRole::kInput, kInColumns, /*record=*/true)};
  if (by.new_amax.defined()) raise_expert_amax(x.plain, counts.rows, by.new_amax);
  return x;
}

ExpertOperand ExpertLinear::gradient(const at::Tensor& dy, const ExpertCounts& counts,
                                     const at::Tensor& amax) const {
  if (!options_.enabled()) return {dy, {}};
  const bool both = quantizes_weight_grad();
  return {both ? at::Tensor() : dy, quantize(dy, counts, OperandRole::kGradient,
                                             both ? kBoth : kInRows, /*record=*/true, amax)};
}

QuantizedTensor ExpertLinear::weight_codes(const at::Tensor& value, Orientations wanted,
                                           bool record) const {
  ParameterStore& store = *weight_.store;
  const int64_t version = store.values_version();
  if (version < 0)
    return quantize_expert_weight(value, options_, wanted, scales(OperandRole::kWeight, record));
  if (version != kept_.version || kept_.store != &store) {
    ExpertScales by = scales(OperandRole::kWeight, /*record=*/false);
    kept_.amax = at::Tensor();
    if (by.scale.defined())
      by.new_amax = kept_.amax = at::zeros({value.size(0)}, value.options().dtype(at::kFloat));
    kept_.codes =
        quantize_expert_weight(value, options_, store.only_forward() ? wanted : kBoth, by);
    kept_.store = &store;
    store.quantized(weight_, kept_.codes);
    kept_.version = version;
  }
  if (record && kept_.amax.defined()) {
    at::Tensor slot = scales(OperandRole::kWeight, /*record=*/true).new_amax;
    at::maximum_out(slot, slot, kept_.amax);
    kept_.amax = at::Tensor();
  }
  return kept_.codes;
}

at::Tensor ExpertLinear::forward(const ExpertOperand& x, const at::Tensor& value,
                                 const ExpertCounts& counts) const {
  if (!options_.enabled()) {
    const at::Tensor y = empty_rows(value, x.plain, value.size(1));
    grouped_forward_into(x.plain, value, counts.rows, y, counts.before);
    return y;
  }
  const at::Tensor y = empty_rows(value, x.codes.rows.codes, value.size(1));
  const bool fast = options_.recipe != QuantizationRecipe::kBlockwise;
  grouped_quantized_product_into(x.codes.rows, weight_codes(value, kInRows, /*record=*/false).rows,
                                 counts.rows, y, fast, counts.before);
  return y;
}

at::Tensor ExpertLinear::input_grad(const ExpertOperand& dy, const at::Tensor& value,
                                    const ExpertCounts& counts) const {
  if (!options_.enabled()) {
    const at::Tensor dx = empty_rows(value, dy.plain, value.size(2));
    grouped_input_grad_into(dy.plain, value, counts.rows, dx, counts.before);
    return dx;
  }
  const at::Tensor dx = empty_rows(value, dy.codes.rows.codes, value.size(2));
  grouped_quantized_product_into(dy.codes.rows,
                                 weight_codes(value, kInColumns, /*record=*/true).columns,
                                 counts.rows, dx, /*fast=*/false, counts.before);
  return dx;
}

void ExpertLinear::weight_grad(const ExpertOperand& dy, const ExpertOperand& x,
                               const at::Tensor& counts, const GradTarget& target) const {
  if (!x.codes.columns.defined())
    return grouped_weight_grad(dy.plain, x.plain, counts, target.tensor, target.beta);
  grouped_quantized_weight_grad(dy.codes.columns, x.codes.columns, counts, target.tensor,
                                target.beta);
}

}  // namespace megatron
