// Linear layers whose three products have operands in FP8 (or FP4).
//
//   y  = x8 w8^T     x8 by rows, w8 by rows
//   dx = g8 w8       g8 by rows, w8 transposed         g = dy
//   dw = g8^T x8     both transposed; accumulated straight into the fp32 target
//
// Note [What quantised linears keep]
// Products on Hopper sum along contiguous elements of both operands, so each operand is quantised
// in one pass into the two orientations that it is used in. The transposed input is saved for the
// backward instead of the input, 1 byte per element. With sequence parallelism the layer saves its
// own rows in the model's type, as without quantisation: the gathered quantised input would be
// larger. A weight is quantised when its value has changed, once a step, and both copies (2 bytes
// per element) are kept; where values are gathered for each pass (fully sharded) it is quantised
// each time.
//
// Note [Quantised gradients] With delayed scaling the scale of every operand is known in advance,
// so a norm writes its result in quantised form only. So does a gated activation: its result in the
// forward, and in the backward the gradient of linear_fc1's output, which is then not a tensor that
// autograd could carry. linear_fc2 stores it in linear_fc1's state, whose backward runs next, and
// returns an undefined gradient.
//
// Note [Measuring]
// A scale is computed from the tensor's amax, which needs a pass over the tensor. Norms and
// activations compute it while they write: their kernels raise an amax on the device. Under delayed
// scaling the scale is known beforehand, and the cast measures the amax for the next step.
#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/kernels/few_rows_product.h"
#include "megatron/kernels/sum_parts.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor_parallel/detail/linear_state.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr Orientations kBoth{true, true}, kInRows{true, false}, kInColumns{false, true};

// Chooses the scale of one operand and records its amax.
class OperandScaling {
 public:
  // `record`: the amax enters the next step's scales.
  OperandScaling(LinearState& state, OperandRole role, bool record) : state_(state), role_(role) {
    const QuantizationRecipe recipe = state.quantization.recipe;
    if (recipe == QuantizationRecipe::kDelayed)
      scales_ = state.weight->store->delayed_scales(*state.weight);
    by_own_values_ = recipe == QuantizationRecipe::kTensorwise ||
                     (recipe == QuantizationRecipe::kDelayed && !is_measured());
    if (scales_ != nullptr && record)
      slot_ = scales_->amax.narrow(0, static_cast<int64_t>(role), 1);
  }

  // Where the kernel that computes the operand writes its amax, [1]; undefined: not needed.
  at::Tensor to_measure(const at::Tensor& like) {
    if (like.scalar_type() == at::kDouble) return {};  // kernels measure only what they cast
    if (by_own_values_) {
      measured_ = at::zeros({1}, like.options().dtype(at::kFloat));
      return measured_;
    }
    recorded_ = slot_.defined();
    return slot_;
  }
  // The operand's amax was measured elsewhere, into the to_measure() of another object of this
  // role.
  void take_measured(const at::Tensor& amax) {
    if (by_own_values_) {
      measured_ = amax;
    } else {
      recorded_ = true;
    }
  }
  // Reuses the scale of an earlier quantisation of the same values.
  void repeat(const at::Tensor& scale) { earlier_ = scale; }

  // Whether a kernel can quantise its result as it computes: with a known scale, or by blocks.
  bool is_known() const {
    if (state_.quantization.recipe == QuantizationRecipe::kBlockwise) return true;
    return state_.quantization.recipe == QuantizationRecipe::kDelayed && !by_own_values_;
  }
  // Quantises an activation's result, or with `dy` its gradient. Requires is_known().
  QuantizedTensor quantize_activation(const at::Tensor& x, const at::Tensor& dy,
                                      Activation activation, double offset,
                                      Orientations wanted) const {
    check_alignment(x);
    return megatron::quantize_activation(x, dy, activation, offset, state_.quantization.type(role_),
                                         wanted, known_scale());
  }
  // Whether the layer's norm can quantise its result: with one known scale, for rows as they arrive
  // here.
  bool norm_goes_into_codes(const at::Tensor& x) const {
    return state_.quantization.recipe == QuantizationRecipe::kDelayed && !by_own_values_ &&
           can_quantize_norm(x);
  }
  QuantizedNorm quantize_norm(const at::Tensor& x, Orientations wanted) const {
    check_alignment(x);
    NormParameters& norm = *state_.norm;
    const AcquiredValue gain(&norm.weight), bias(norm.bias_or_null());
    const auto as_x = [&](const at::Tensor& t) { return t.defined() ? t.to(x.scalar_type()) : t; };
    return megatron::quantize_norm(norm.options.kind, x, as_x(gain.value()), as_x(bias.value()),
                                   norm.options.eps, norm.options.zero_centered,
                                   state_.quantization.type(role_), wanted, known_scale());
  }

  QuantizedTensor quantize(const at::Tensor& x, Orientations wanted) const {
    check_alignment(x);
    TensorScale by;
    if (earlier_.defined()) {
      by.scale = earlier_;
    } else if (by_own_values_) {
      by.amax = measured_;
      by.new_amax = slot_;
    } else if (scales_ != nullptr) {
      by.scale = scales_->state.select(0, static_cast<int64_t>(role_));
      if (!recorded_) by.new_amax = slot_;
    }
    return quantize_operand(x, role_, state_.quantization, wanted, by);
  }

 private:
  TensorScale known_scale() const {
    if (scales_ == nullptr) return {};
    return {scales_->state.select(0, static_cast<int64_t>(role_)), {}, slot_};
  }
  bool is_measured() const { return scales_ != nullptr && scales_->measured; }
  void check_alignment(const at::Tensor& x) const {
    const int64_t unit = state_.quantization.alignment(), columns = x.size(-1),
                  rows = x.numel() / std::max<int64_t>(1, columns);
    const char* what = role_ == OperandRole::kWeight  ? "weight"
                       : role_ == OperandRole::kInput ? "input"
                                                      : "output gradient";
    MEGATRON_CHECK(rows % unit == 0 && columns % unit == 0, state_.weight->name, ": its ", what,
                   " of ", rows, " x ", columns, " cannot be quantised, both must be multiples of ",
                   unit,
                   "\nhint: --micro-batch-size x --seq-length and the sizes of the layer on one "
                   "rank count; without "
                   "--fp8-format there is no such rule");
  }

  LinearState& state_;
  const OperandRole role_;
  const DelayedScales* scales_ = nullptr;
  bool by_own_values_ = false, recorded_ = false;
  at::Tensor slot_;      // where this step's amax is recorded
  at::Tensor measured_;  // the amax, if already known
  at::Tensor earlier_;
};

// Note [Inputs with a scale for each row] In forwards without a backward, where a tensor has one
// scale, an input's rows have one each instead. It is known when the kernel that makes the row
// ends, so that a norm or an activation writes codes alone; and no row's rounding depends on those
// of other sequences in the step.
bool scales_rows(const LinearState& state, const at::Tensor& x, int64_t columns) {
  return !at::GradMode::is_enabled() && state.weight->store->only_forward() &&
         state.quantization.recipe == QuantizationRecipe::kTensorwise &&
         can_quantize_rows(x, columns);
}

// The quantised weight, in both orientations where copies are kept. `record`: see OperandScaling;
// once for each value.
QuantizedTensor weight_codes(LinearState& state, const at::Tensor& value, Orientations wanted,
                             bool record) {
  WeightCodes& kept = state.weight_codes;
  ParameterStore& store = *state.weight->store;
  const int64_t version = store.values_version();
  const bool delayed = state.quantization.recipe == QuantizationRecipe::kDelayed;
  if (version < 0 || version != kept.version || kept.store != &store) {
    OperandScaling scaling(state, OperandRole::kWeight, record);
    if (delayed && !record && store.delayed_scales(*state.weight) != nullptr) {
      // If an evaluation comes first, the step that follows records what is measured here.
      const at::Tensor amax = largest_magnitude(value);
      scaling.take_measured(amax);
      kept.amax = amax;
    } else {
      kept.amax = at::Tensor();
    }
    QuantizedTensor codes =
        scaling.quantize(value, version < 0 || store.only_forward() ? wanted : kBoth);
    if (version < 0) return codes;
    kept.codes = std::move(codes);
    kept.row_scales = scales_rows(state, value, value.size(-1))
                          ? with_row_scales(kept.codes.rows).scale
                          : at::Tensor();
    kept.no_scale = kept.row_scales.defined() ? no_scale(value.device()) : at::Tensor();
    kept.store = &store;
    kept.version = version;
    store.quantized(*state.weight, kept.codes);
  } else if (record && kept.amax.defined()) {
    const DelayedScales& scales = *store.delayed_scales(*state.weight);
    at::Tensor slot = scales.amax.narrow(0, static_cast<int64_t>(OperandRole::kWeight), 1);
    at::maximum_out(slot, slot, kept.amax);
    kept.amax = at::Tensor();
  }
  return kept.codes;
}

at::Tensor multiply(const LinearState& state, const QuantizedMatrix& a, const QuantizedMatrix& b,
                    at::IntArrayRef leading, at::ScalarType type, const at::Tensor& bias,
                    bool forward, const at::Tensor& addend = {}) {
  std::vector<int64_t> shape = leading.vec();
  shape.back() = b.codes.size(0);
  const bool fast = forward && state.quantization.recipe != QuantizationRecipe::kBlockwise;
  return quantized_product(a, b, type, bias, fast, addend).view(shape);
}

// A weight as products take it whose input has a scale for each row.
QuantizedMatrix weight_with_row_scales(LinearState& state, const at::Tensor& value) {
  const QuantizedMatrix codes = weight_codes(state, value, kInRows, /*record=*/false).rows;
  const at::Tensor& kept = state.weight_codes.row_scales;
  const bool is_kept = state.weight_codes.codes.rows.codes.is_same(codes.codes) && kept.defined();
  return is_kept ? QuantizedMatrix{codes.codes, kept, ScaleLayout::kRow} : with_row_scales(codes);
}

// Note [Scales behind a product] For operands with one scale cuBLAS has tiles of many sizes, for
// scales of rows and columns those of 128 x 128 alone, which leave most multiprocessors without
// work where there are few rows: 4096 x 14336 at up to 128 rows takes 37 us with them and 20
// without (H200). There a product is computed without the scales of its rows, and rounded; what
// reads it multiplies by them, which is exact, since they are powers of two.
bool scales_behind(const LinearState& state, const QuantizedMatrix& x) {
  constexpr int64_t kMostRows = 256;
  return x.codes.is_cuda() && x.codes.size(0) <= kMostRows && state.weight_codes.no_scale.defined();
}

// x w^T without the scales of rows of x, shaped as `leading` but for the last dimension.
at::Tensor multiply_without_scales(LinearState& state, const QuantizedMatrix& x,
                                   const at::Tensor& value, at::IntArrayRef leading) {
  const QuantizedMatrix w = weight_codes(state, value, kInRows, /*record=*/false).rows;
  return multiply(state, {x.codes, state.weight_codes.no_scale, ScaleLayout::kTensor}, w, leading,
                  value.scalar_type(), {}, /*forward=*/true);
}

// x w^T (+ bias) (+ addend) of an input whose rows have a scale each.
at::Tensor multiply_rows(LinearState& state, const QuantizedMatrix& x, const at::Tensor& value,
                         at::IntArrayRef leading, const at::Tensor& bias,
                         const at::Tensor& addend = {}) {
  const QuantizedMatrix w = weight_with_row_scales(state, value);
  if (!scales_behind(state, x))
    return multiply(state, x, w, leading, value.scalar_type(), bias, /*forward=*/true, addend);
  const at::Tensor y = multiply_without_scales(state, x, value, leading);
  multiply_by_factors(y, x.scale, bias, addend);
  return y;
}

// Whether the quantised input is saved for the weight gradient.
bool keeps_codes(const LinearState& state) {
  const bool built_again = state.norm != nullptr
                               ? state.recompute_norm
                               : state.input_activation && state.recompute_activation;
  return state.weight->trainable && state.quantization.weight_gradient && !built_again &&
         !state.sequence_parallel;
}
// A row-parallel layer's input is local to this rank, with or without sequence parallelism.
bool row_keeps_codes(const LinearState& state) {
  return state.weight->trainable && state.quantization.weight_gradient &&
         !(state.input_activation && state.recompute_activation);
}

Orientations gradient_orientations(const LinearState& state) {
  return state.weight->trainable && state.quantization.weight_gradient ? kBoth : kInRows;
}

// Whether an activation's kernel can write its result, shaped as `like`, in quantised form only.
bool goes_into_codes(const OperandScaling& scaling, Activation activation, const at::Tensor& like) {
  return scaling.is_known() && is_gated(activation) && like.scalar_type() != at::kDouble;
}
// Whether a layer's backward needs its output gradient in quantised form only.
bool takes_codes_alone(const LinearState& state) {
  return state.bias == nullptr && (!state.weight->trainable || state.quantization.weight_gradient);
}

struct SavedCodes {
  at::Tensor codes, scale;
};
QuantizedMatrix kept_matrix(const LinearState& state, const SavedCodes& saved) {
  const bool blocks = state.quantization.recipe == QuantizationRecipe::kBlockwise;
  return {saved.codes, saved.scale, blocks ? ScaleLayout::kVector128 : ScaleLayout::kTensor};
}

// dw from the quantised dy and the input: the saved quantised one, or else the result of `input`.
void quantized_weight_grad(LinearState& state, const QuantizedTensor& gradient,
                           const at::Tensor& dy, const SavedCodes& saved,
                           const std::function<at::Tensor()>& input) {
  if (!state.weight->trainable) return;
  if (!state.quantization.weight_gradient) return accumulate_weight_grad(*state.weight, dy, input);
  run_weight_gradient(*state.weight,
                      [&state, g = gradient.columns, saved, input](const GradTarget& target) {
                        QuantizedMatrix x = kept_matrix(state, saved);
                        if (!saved.codes.defined()) {
                          OperandScaling scaling(state, OperandRole::kInput, /*record=*/false);
                          if (saved.scale.defined()) scaling.repeat(saved.scale);
                          x = scaling.quantize(input(), kInColumns).columns;
                        }
                        quantized_product_into(g, x, target.tensor, target.beta);
                      });
}

// The scale to reuse when the input is quantised again; block scales follow from the values.
at::Tensor scale_to_repeat(const LinearState& state, const QuantizedTensor& input) {
  return state.quantization.recipe == QuantizationRecipe::kBlockwise ? at::Tensor()
                                                                     : input.rows.scale;
}

LinearState& saved_state(AutogradContext* context) {
  return *reinterpret_cast<LinearState*>(context->saved_data["state"].toInt());
}

struct QuantizedColumnFunction : torch::autograd::Function<QuantizedColumnFunction> {
  // Saves x, mean and rstd for a norm; the quantised input and its scale, or the unquantised input
  // and the scale.
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                               LinearState* pointer, bool recording) {
    LinearState& state = *pointer;
    const AcquiredValue weight(state.weight), bias(state.bias);
    const at::ScalarType type = weight.value().scalar_type();
    context->saved_data["state"] = reinterpret_cast<int64_t>(pointer);
    // the gradient of y may come quantised, outside autograd
    context->set_materialize_grads(false);
    OperandScaling scaling(state, OperandRole::kInput, recording);
    const bool norm = state.norm != nullptr, keep = recording && keeps_codes(state);
    const bool save_input =
        recording && !keep && state.weight->trainable && !(norm && state.recompute_norm);
    const bool own_rows = norm && x.scalar_type() == type && !divides_rows(state);
    at::Tensor input = x;
    NormResult normed;
    QuantizedTensor codes;
    std::vector<int64_t> shape = x.sizes().vec();
    at::Tensor whole;
    const bool adapted = has_row_adapters(state);
    if (own_rows && !save_input && !adapted && scaling.norm_goes_into_codes(x)) {
      QuantizedNorm result = scaling.quantize_norm(x, keep ? kBoth : kInRows);
      normed = {{}, result.mean, result.rstd};
      codes = std::move(result.codes);
    } else {
      if (norm) {
        normed = norm_forward(*state.norm, x, own_rows ? scaling.to_measure(x) : at::Tensor());
        input = normed.y.to(type);
      }
      whole = gathered(state, input);
      shape = whole.sizes().vec();
      codes = scaling.quantize(whole, keep ? kBoth : kInRows);
    }
    const at::Tensor y =
        multiply(state, codes.rows, weight_codes(state, weight.value(), kInRows, recording).rows,
                 shape, type, bias.value(), /*forward=*/true);
    if (adapted) RowAdapters::current()->add_output(*state.weight, whole, y);
    if (!recording) return {y, x};
    context->save_for_backward({norm ? x : at::Tensor(), normed.mean, normed.rstd,
                                save_input ? input : at::Tensor(),
                                keep ? codes.columns.codes : at::Tensor(),
                                keep ? codes.columns.scale : scale_to_repeat(state, codes)});
    return {y, x};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    LinearState& state = saved_state(context);
    const variable_list saved = saved_for(*state.weight, context->get_saved_variables());
    MeasuredGradient measured = std::exchange(state.measured, {});
    at::Tensor dy;
    QuantizedTensor gradient;
    std::vector<int64_t> shape;
    if (grads[0].defined()) {
      dy = grads[0].contiguous();
      shape = dy.sizes().vec();
      OperandScaling scaling(state, OperandRole::kGradient, /*record=*/true);
      if (measured.gradient.defined() && measured.gradient.is_same(grads[0]))
        scaling.take_measured(measured.amax);
      gradient = scaling.quantize(dy, gradient_orientations(state));
    } else {
      MEGATRON_ASSERT(measured.codes.rows.defined(), state.weight->name, ": no gradient arrived");
      gradient = std::move(measured.codes);
      shape = std::move(measured.shape);
    }
    at::Tensor dx;
    at::ScalarType type;
    {
      const AcquiredValue weight(state.weight);
      type = weight.value().scalar_type();
      dx = multiply(state, gradient.rows,
                    weight_codes(state, weight.value(), kInColumns, true).columns, shape, type, {},
                    /*forward=*/false);
    }
    // overlaps with the weight gradient
    const std::shared_ptr<Work> reduction = sum_over_ranks(state, dx);
    quantized_weight_grad(state, gradient, dy, {saved[4], saved[5]}, [&state, saved, type] {
      if (saved[3].defined()) return gathered(state, saved[3]);
      return gathered(state, norm_apply(*state.norm, saved[0], saved[1], saved[2]).to(type));
    });
    if (dy.defined()) accumulate_bias_grad(state.bias, dy);
    if (reduction) reduction->wait();
    const at::Tensor& residual_path_grad = grads[1];  // undefined without a residual path
    if (state.norm != nullptr) {
      dx = norm_backward(*state.norm, dx, saved[0], saved[1], saved[2], residual_path_grad);
    } else if (residual_path_grad.defined()) {
      dx = dx + residual_path_grad;
    }
    return {dx, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct QuantizedRowFunction : torch::autograd::Function<QuantizedRowFunction> {
  // Saves the input of the activation; the quantised input of the product and its scale, or the
  // unquantised one.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& before,
                            const std::optional<at::Tensor>& residual, const at::Tensor&,
                            LinearState* pointer, bool recording, bool is_activated) {
    LinearState& state = *pointer;
    const AcquiredValue weight(state.weight), bias(state.bias);
    const at::ScalarType type = weight.value().scalar_type();
    context->saved_data["state"] = reinterpret_cast<int64_t>(pointer);
    context->saved_data["residual"] = residual.has_value();
    OperandScaling scaling(state, OperandRole::kInput, recording);
    const bool keep = recording && row_keeps_codes(state);
    QuantizedTensor codes;
    at::Tensor input = before;
    const bool adapted = has_row_adapters(state),
               activate = state.input_activation && !is_activated;
    if (activate && !adapted && goes_into_codes(scaling, *state.input_activation, before)) {
      codes = scaling.quantize_activation(before, {}, *state.input_activation,
                                          state.activation_offset, keep ? kBoth : kInRows);
    } else {
      if (activate)
        input = activation_forward(before, *state.input_activation, state.activation_offset,
                                   scaling.to_measure(before));
      codes = scaling.quantize(input, keep ? kBoth : kInRows);
    }
    const QuantizedTensor weights = weight_codes(state, weight.value(), kInRows, recording);
    const bool alone = state.tp->size() == 1;
    at::Tensor y = multiply(
        state, codes.rows, weights.rows, before.sizes(), type, alone ? bias.value() : at::Tensor(),
        /*forward=*/true, alone ? residual.value_or(at::Tensor()) : at::Tensor());
    if (adapted) RowAdapters::current()->add_output(*state.weight, input, y);
    if (recording) {
      const bool save_before =
          state.input_activation.has_value() || (!keep && state.weight->trainable);
      context->save_for_backward({save_before ? before : at::Tensor(),
                                  keep ? codes.columns.codes : at::Tensor(),
                                  keep ? codes.columns.scale : scale_to_repeat(state, codes)});
    }
    if (alone) return y;
    return summed_over_ranks(state, y, bias.value(), residual.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    LinearState& state = saved_state(context);
    const variable_list saved = saved_for(*state.weight, context->get_saved_variables());
    accumulate_bias_grad(state.bias,
                         grads[0].contiguous());  // a partial sum with sequence_parallel
    const at::Tensor dy = gathered(state, grads[0].contiguous());
    OperandScaling scaling(state, OperandRole::kGradient, /*record=*/true);
    const QuantizedTensor gradient = scaling.quantize(dy, gradient_orientations(state));
    at::Tensor dx;
    {
      const AcquiredValue weight(state.weight);
      dx = multiply(state, gradient.rows,
                    weight_codes(state, weight.value(), kInColumns, true).columns, dy.sizes(),
                    weight.value().scalar_type(), {}, /*forward=*/false);
    }
    quantized_weight_grad(state, gradient, dy, {saved[1], saved[2]}, [&state, before = saved[0]] {
      return state.input_activation
                 ? activation_forward(before, *state.input_activation, state.activation_offset)
                 : before;
    });
    const auto gradients_of = [&](const at::Tensor& input) -> variable_list {
      return {input, residual_grad(context, grads[0]), {}, {}, {}, {}};
    };
    if (!state.input_activation) return gradients_of(dx);
    const Activation activation = *state.input_activation;
    LinearState* from = state.input_from != nullptr && state.input_from->quantization.enabled()
                            ? state.input_from
                            : nullptr;
    if (from == nullptr)
      return gradients_of(activation_backward(dx, saved[0], activation, state.activation_offset));
    OperandScaling before(*from, OperandRole::kGradient, /*record=*/true);
    if (goes_into_codes(before, activation, dx) && takes_codes_alone(*from)) {
      from->measured = {
          {},
          {},
          before.quantize_activation(saved[0], dx, activation, state.activation_offset,
                                     gradient_orientations(*from)),
          saved[0].sizes().vec()};
      return gradients_of({});
    }
    const at::Tensor amax = before.to_measure(dx);
    dx = activation_backward(dx, saved[0], activation, state.activation_offset, amax);
    if (amax.defined()) from->measured = {dx, amax};
    return gradients_of(dx);
  }
};

// Rows of a forward without a backward may be any number: as many as repeat the last one are added
// as complete the tiles, which changes no scale. Undefined: they are complete.
at::Tensor with_whole_tiles(const at::Tensor& x, const LinearState& state) {
  const int64_t rows = x.numel() / std::max<int64_t>(1, x.size(-1)),
                missing = -rows & (state.quantization.alignment() - 1);
  if (at::GradMode::is_enabled() || state.sequence_parallel || missing == 0 || rows == 0) return {};
  const at::Tensor flat = x.reshape({rows, 1, x.size(-1)});
  return at::cat({flat, flat.narrow(0, rows - 1, 1).expand({missing, 1, -1})});
}

// The rows of y that are not added ones, shaped as x.
at::Tensor without_added_rows(const at::Tensor& y, const at::Tensor& x) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = y.size(-1);
  return y.narrow(0, 0, x.numel() / x.size(-1)).view(shape);
}

// Whether the layer behind takes factors of the rows of this one's output, which are like `x`.
bool activates_rows(const LinearState& state, const at::Tensor& x) {
  const LinearState* const to = state.output_to;
  return to != nullptr && to->input_activation && is_gated(*to->input_activation) &&
         scales_rows(*to, x, to->weight->local_shape.back()) && !has_row_adapters(*to);
}

// The layers where inputs have a scale for each row: Note [Inputs with a scale for each row]. Of
// divided rows codes are exchanged.
at::Tensor column_of_scaled_rows(const at::Tensor& in, LinearState& state) {
  state.output_factors = at::Tensor();
  const AcquiredValue weight(state.weight), bias(state.bias);
  const at::ScalarType type = weight.value().scalar_type();
  const bool adapted = has_row_adapters(state), exchanges = divides_rows(state) && !adapted;
  at::Tensor whole = in;
  QuantizedMatrix rows;
  if (state.norm != nullptr && in.scalar_type() == type && !state.sequence_parallel && !adapted) {
    NormParameters& norm = *state.norm;
    const AcquiredValue gain(&norm.weight), offset(norm.bias_or_null());
    rows = quantize_norm_rows(norm.options.kind, in, gain.value(), offset.value(), norm.options.eps,
                              norm.options.zero_centered);
  } else {
    if (state.norm != nullptr) whole = norm_forward(*state.norm, in).y.to(type);
    if (!exchanges) whole = gathered(state, whole);
    rows = quantize_rows(whole);
  }
  if (exchanges)
    return gathered_quantized_forward(rows, weight_with_row_scales(state, weight.value()), type,
                                      bias.value(), *state.tp, state.mailbox.get())
        .unsqueeze(1);
  weight_codes(state, weight.value(), kInRows, /*record=*/false);
  if (scales_behind(state, rows) && !adapted && !bias.value().defined() &&
      activates_rows(state, in)) {
    state.output_factors = rows.scale;
    return multiply_without_scales(state, rows, weight.value(), whole.sizes());
  }
  const at::Tensor y = multiply_rows(state, rows, weight.value(), whole.sizes(), bias.value());
  if (adapted) RowAdapters::current()->add_output(*state.weight, whole, y);
  return y;
}

at::Tensor row_of_scaled_rows(const at::Tensor& in, const at::Tensor& residual, LinearState& state,
                              bool is_activated) {
  const AcquiredValue weight(state.weight), bias(state.bias);
  const bool adapted = has_row_adapters(state), alone = state.tp->size() == 1,
             activate = state.input_activation && !is_activated;
  const at::Tensor factors = state.input_from != nullptr
                                 ? std::exchange(state.input_from->output_factors, at::Tensor())
                                 : at::Tensor();
  MEGATRON_ASSERT(!factors.defined() || (activate && !adapted),
                  "rows without their scales where none is expected");
  at::Tensor input = in;
  QuantizedMatrix rows;
  if (activate && !adapted && is_gated(*state.input_activation)) {
    rows = quantize_activation_rows(in, *state.input_activation, state.activation_offset, factors);
  } else {
    if (activate) input = activation_forward(in, *state.input_activation, state.activation_offset);
    rows = quantize_rows(input);
  }
  if (divides_rows(state) && !adapted && state.tp->size() < kMaxSumParts) {
    const bool together = !bias.value().defined() && !is_batch_invariant();
    const at::Tensor y =
        scattered_quantized_forward(rows, weight_with_row_scales(state, weight.value()),
                                    weight.value().scalar_type(), *state.tp, state.mailbox.get(),
                                    together ? residual : at::Tensor())
            .unsqueeze(1);
    if (bias.value().defined()) y.add_(bias.value());
    return together || !residual.defined() ? y : y.add_(residual);
  }
  weight_codes(state, weight.value(), kInRows, /*record=*/false);
  if (scales_behind(state, rows) && !alone && !adapted)
    return summed_over_ranks(state,
                             multiply_without_scales(state, rows, weight.value(), in.sizes()),
                             bias.value(), residual, rows.scale);
  at::Tensor y =
      multiply_rows(state, rows, weight.value(), in.sizes(), alone ? bias.value() : at::Tensor(),
                    alone ? residual : at::Tensor());
  if (adapted) RowAdapters::current()->add_output(*state.weight, input, y);
  return alone ? y : summed_over_ranks(state, y, bias.value(), residual);
}

}  // namespace

at::Tensor quantized_few_rows(const at::Tensor& x, const at::Tensor& addend, LinearState& state,
                              bool swiglu) {
  if (!x.is_cuda() || at::GradMode::is_enabled() || !state.weight->store->only_forward() ||
      divides_rows(state) || has_row_adapters(state) || is_batch_invariant() ||
      state.quantization.recipe == QuantizationRecipe::kNvfp4 || x.numel() == 0 ||
      x.numel() > kMostRowsOnGpu * x.size(-1))
    return {};
  AroundProduct around;
  around.swiglu = swiglu;
  std::optional<AcquiredValue> gain;
  if (!add_norm(state, around, gain)) return {};
  const AcquiredValue weight(state.weight), bias(state.bias);
  if (weight.value().scalar_type() != x.scalar_type()) return {};
  const QuantizedMatrix codes = weight_codes(state, weight.value(), kInRows, false).rows;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = codes.codes.size(0) / (swiglu ? 2 : 1);
  const at::Tensor y = at::empty(shape, x.options());
  const auto as_rows = [](const at::Tensor& t) {
    return t.defined() ? t.view({-1, t.size(-1)}) : t;
  };
  const bool done =
      multiply_few_rows(as_rows(x), codes, state.tp->size() == 1 ? bias.value() : at::Tensor(),
                        as_rows(addend), as_rows(y), /*at_rest=*/true, around);
  return done ? y : at::Tensor();
}

variable_list quantized_column_forward(const at::Tensor& x, LinearState& state) {
  if (const at::Tensor y = quantized_few_rows(x.contiguous(), {}, state, /*swiglu=*/false);
      y.defined())
    return {y, x};
  const at::Tensor whole = with_whole_tiles(x, state),
                   in = whole.defined() ? whole : x.contiguous();
  variable_list out;
  if (scales_rows(state, x, state.weight->local_shape.back()))
    out = {column_of_scaled_rows(in, state), x};
  else
    out = QuantizedColumnFunction::apply(in, anchor(), &state, at::GradMode::is_enabled());
  if (!whole.defined()) return {of_all_rows(state, out[0]), out[1]};
  return {without_added_rows(out[0], x), x};
}

at::Tensor quantized_row_forward(const at::Tensor& x, const at::Tensor& residual,
                                 LinearState& state, bool is_activated) {
  if (!state.input_activation || is_activated) {
    const bool alone = state.tp->size() == 1;
    const at::Tensor addend = alone && residual.defined() ? residual.contiguous() : at::Tensor();
    if (const at::Tensor y = quantized_few_rows(x.contiguous(), addend, state, /*swiglu=*/false);
        y.defined()) {
      if (alone) return y;
      const AcquiredValue bias(state.bias);
      return summed_over_ranks(state, y, bias.value(), residual);
    }
  }
  const at::Tensor whole = with_whole_tiles(x, state),
                   in = whole.defined() ? whole : x.contiguous(),
                   rest = whole.defined() && residual.defined() && !divides_rows(state)
                              ? with_whole_tiles(residual, state)
                              : residual;
  const at::Tensor y =
      scales_rows(state, x, state.weight->local_shape.back())
          ? row_of_scaled_rows(in, rest, state, is_activated)
          : QuantizedRowFunction::apply(in, optional_residual(rest), anchor(), &state,
                                        at::GradMode::is_enabled(), is_activated);
  return whole.defined() && !divides_rows(state) ? without_added_rows(y, x) : y;
}

}  // namespace megatron
